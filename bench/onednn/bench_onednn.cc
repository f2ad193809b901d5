// SPDX-License-Identifier: Apache-2.0

// oneDNN Graph's attention for training beside fa2's, forward and backward, on
// the CPU.
//
//   bench_onednn [--threads=N] [--case=NAME]... [--json=FILE]
//                [--form=pattern|softmax|fastest] [--min-time=SECONDS]
//                [--rounds=N]
//   bench_onednn --serve --case=NAME [--form=...]
//
// Cases are named as bench_attention's (bench/attention/case.h), all on one
// number of threads; without --case: 8 heads, N 128 to 4,096, D 64 and 128,
// bf16 and f32, both passes, on --threads (0, the default: all cores). Results
// are held against fa2's first. Then the two take turns, --rounds times (7, of
// --min-time 0.05 s each; fewer where a round takes seconds).
//
// --form: the pattern that oneDNN's guide defines for SDPA training; the same
// by SoftMax and SoftMaxBackward; or, the default, the one of the two whose
// call was faster, timed once.
//
// --serve is for compare_pytorch.py: a line of JSON about the case, then for
// each line of stdin, a number of seconds, oneDNN's seconds a call over at
// least as long.
//
// oneDNN's threads are of its build: oneTBB's, OpenMP's, or those of SYCL's CPU
// device. What all of them follow is the CPUs that the process may use (and
// OMP_NUM_THREADS): for fewer threads than that the program confines itself to
// the first of them and starts anew.
#include <dlfcn.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "bench/attention/call.h"
#include "bench/attention/case.h"
#include "bench/onednn/check.h"
#include "bench/onednn/training_graph.h"

namespace fa2::bench {
namespace {

struct Settings {
  std::vector<AttentionCase> cases;
  int threads = 0;
  std::string json;
  double min_time = 0.05;
  int rounds = 7;
  bool serve = false;
  std::vector<Form> forms = {Form::kPattern, Form::kSoftmax};
};

std::vector<AttentionCase> DefaultCases(int threads) {
  std::vector<AttentionCase> cases;
  for (const Pass pass : {Pass::kBackward, Pass::kForward}) {
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      for (const int64_t head_dim : {64, 128}) {
        for (int64_t length = 128; length <= 4096; length *= 2) {
          AttentionCase c;
          c.pass = pass;
          c.dtype = dtype;
          c.queries = c.keys = length;
          c.head_dim = head_dim;
          c.threads = threads;
          cases.push_back(c);
        }
      }
    }
  }
  return cases;
}

int AllowedCpus() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

// False, and a sentence on stderr, for arguments that mean nothing.
bool ReadArguments(int argc, char** argv, Settings* settings) {
  std::vector<std::string> names;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    const size_t equals = arg.find('=');
    const std::string key = arg.substr(0, equals);
    const std::string value =
        equals == std::string::npos ? "" : arg.substr(equals + 1);
    if (arg == "--serve") {
      settings->serve = true;
    } else if (key == "--case") {
      names.push_back(value);
    } else if (arg == "--form=pattern") {
      settings->forms = {Form::kPattern};
    } else if (arg == "--form=softmax") {
      settings->forms = {Form::kSoftmax};
    } else if (arg == "--form=fastest") {
      settings->forms = {Form::kPattern, Form::kSoftmax};
    } else if (key == "--json") {
      settings->json = value;
    } else if (key == "--threads") {
      settings->threads = std::atoi(value.c_str());
    } else if (key == "--min-time") {
      settings->min_time = std::atof(value.c_str());
    } else if (key == "--rounds") {
      settings->rounds = std::max(1, std::atoi(value.c_str()));
    } else {
      std::cerr << "bench_onednn: no such argument: " << arg << "\n";
      return false;
    }
  }
  if (settings->threads <= 0) settings->threads = AllowedCpus();
  settings->cases = DefaultCases(settings->threads);
  if (!names.empty()) settings->cases.clear();
  for (const std::string& name : names) {
    AttentionCase c;
    std::string error;
    if (!ParseCase(name, &c, &error)) {
      std::cerr << "bench_onednn: " << error << "\n";
      return false;
    }
    if (c.threads <= 0) c.threads = AllowedCpus();
    if (!TrainingGraph::TakesCase(c)) {
      std::cerr << "bench_onednn: " << name
                << ": only cases without options, with as many kv heads as "
                   "heads, of f32, bf16 or f16\n";
      return false;
    }
    settings->cases.push_back(c);
  }
  for (const AttentionCase& c : settings->cases) {
    if (c.threads != settings->cases.front().threads) {
      std::cerr << "bench_onednn: the cases are of different numbers of "
                   "threads; one at a time\n";
      return false;
    }
  }
  if (settings->serve && settings->cases.size() != 1) {
    std::cerr << "bench_onednn: --serve needs one --case\n";
    return false;
  }
  return true;
}

// On as many CPUs as the cases have threads: starts the program anew where the
// process has more. OpenMP and oneTBB read what they may use when they are
// loaded.
bool Confine(int threads, char** argv) {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return true;
  if (threads > CPU_COUNT(&set)) {
    std::cerr << "bench_onednn: " << threads << " threads on "
              << CPU_COUNT(&set) << " CPUs\n";
    return false;
  }
  if (threads == CPU_COUNT(&set)) return true;
  int left = threads;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &set)) continue;
    if (left-- <= 0) CPU_CLR(cpu, &set);
  }
  setenv("OMP_NUM_THREADS", std::to_string(threads).c_str(), 1);
  if (sched_setaffinity(0, sizeof set, &set) == 0) {
    execv("/proc/self/exe", argv);
  }
  std::cerr << "bench_onednn: cannot be confined to " << threads << " CPUs\n";
  return false;
}

// Where oneDNN's CPU runtime is SYCL, SYCL's CPU device is Intel's OpenCL
// runtime, which a pip environment holds beside libdnnl but does not register.
void RegisterCpuDevice() {
  Dl_info info;
  const auto symbol = reinterpret_cast<void*>(&dnnl_version);
  if (dladdr(symbol, &info) == 0 || info.dli_fname == nullptr) return;
  const std::string library = info.dli_fname;
  const std::string runtime =
      library.substr(0, library.rfind('/') + 1) + "libintelocl.so";
  if (access(runtime.c_str(), R_OK) == 0) {
    setenv("OCL_ICD_FILENAMES", runtime.c_str(), 0);
  }
}

const char* RuntimeName(unsigned runtime) {
  switch (runtime) {
    case DNNL_RUNTIME_SEQ:
      return "sequential";
    case DNNL_RUNTIME_OMP:
      return "OpenMP";
    case DNNL_RUNTIME_TBB:
      return "oneTBB";
    case DNNL_RUNTIME_THREADPOOL:
      return "thread pool";
    case DNNL_RUNTIME_SYCL:
      return "SYCL";
    default:
      return "unknown";
  }
}

std::string Version() {
  const dnnl_version_t* const v = dnnl_version();
  std::ostringstream text;
  text << v->major << "." << v->minor << "." << v->patch << ", "
       << RuntimeName(v->cpu_runtime);
  return text.str();
}

template <class Function>
double SecondsPerCall(double at_least, const Function& function) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  int calls = 0;
  double elapsed = 0;
  do {
    function();
    ++calls;
    elapsed = std::chrono::duration<double>(Clock::now() - begin).count();
  } while (elapsed < at_least);
  return elapsed / calls;
}

double Median(std::vector<double> values) {
  const auto middle =
      values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::string Quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c == '\n' ? ' ' : c;
  }
  return result + "\"";
}

// Partitions and bytes of what a case runs.
struct Cost {
  Cost(const TrainingGraph& graph, Pass pass)
      : form(graph.form() == Form::kPattern ? "pattern" : "softmax") {
    if (pass != Pass::kBackward) Add(graph.forward());
    if (pass != Pass::kForward) Add(graph.backward());
  }
  void Add(const CompiledGraph& graph) {
    partitions += graph.partitions();
    scratch = std::max(scratch, graph.scratch_bytes());
    between = std::max(between, graph.between_bytes());
  }
  std::string Json() const {
    std::ostringstream text;
    text << "\"onednn_form\": " << Quoted(form)
         << ", \"onednn_partitions\": " << partitions
         << ", \"onednn_scratch_bytes\": " << scratch
         << ", \"onednn_between_bytes\": " << between;
    return text.str();
  }
  std::string form;
  size_t partitions = 0, scratch = 0, between = 0;
};

struct Prepared {
  std::unique_ptr<TrainingGraph> graph;
  double difference = 0;
  std::string error;
};

// A graph whose results have been held against fa2's; otherwise none, and a
// sentence.
Prepared Prepare(const AttentionCase& c, Form form) {
  Prepared result;
  try {
    result.graph = std::make_unique<TrainingGraph>(c, form);
    result.graph->Run(Pass::kBoth);
  } catch (const dnnl::error& e) {
    result.error = std::string("oneDNN: ") + e.what() + " (status " +
                   std::to_string(static_cast<int>(e.status)) + ")";
  }
  if (result.error.empty()) {
    result.difference = Difference(c, *result.graph, &result.error);
  }
  if (!result.error.empty()) result.graph.reset();
  return result;
}

// The faster of several forms.
Prepared Prepare(const AttentionCase& c, const std::vector<Form>& forms) {
  Prepared best;
  double best_seconds = 0;
  for (const Form form : forms) {
    Prepared next = Prepare(c, form);
    if (next.graph == nullptr) {
      if (best.graph == nullptr) best = std::move(next);
      continue;
    }
    const double seconds = SecondsPerCall(0, [&] { next.graph->Run(c.pass); });
    if (best.graph == nullptr || seconds < best_seconds) {
      best = std::move(next);
      best_seconds = seconds;
    }
  }
  return best;
}

int Serve(const AttentionCase& c, const std::vector<Form>& forms) {
  const Prepared prepared = Prepare(c, forms);
  if (prepared.graph == nullptr) {
    std::cout << "{\"error\": " << Quoted(prepared.error) << "}" << std::endl;
    return 1;
  }
  std::cout << "{\"onednn\": " << Quoted(Version()) << ", "
            << Cost(*prepared.graph, c.pass).Json()
            << ", \"onednn_difference\": " << prepared.difference << "}"
            << std::endl;
  double at_least = 0;
  while (std::cin >> at_least) {
    std::cout << SecondsPerCall(at_least, [&] { prepared.graph->Run(c.pass); })
              << std::endl;
  }
  return 0;
}

// A JSON object, and a line on stdout.
std::string Measure(const AttentionCase& c, const Settings& settings) {
  std::ostringstream row;
  row << "{\"case\": " << Quoted(c.Name()) << ", ";
  const Prepared prepared = Prepare(c, settings.forms);
  TrainingGraph* const graph = prepared.graph.get();
  std::string error = prepared.error;
  std::unique_ptr<AttentionCall> fa2;
  if (error.empty()) {
    const Status status = AttentionCall::Create(c, &fa2);
    if (!status.ok()) error = status.message();
  }
  if (!error.empty()) {
    std::cout << c.Name() << ": " << error << std::endl;
    row << "\"error\": " << Quoted(error) << "}";
    return row.str();
  }
  std::vector<double> ours, theirs, ratios;
  bool ok = true;
  const auto run_fa2 = [&] {
    ours.push_back(
        SecondsPerCall(settings.min_time, [&] { ok = fa2->Run().ok() && ok; }));
  };
  const auto run_onednn = [&] {
    theirs.push_back(
        SecondsPerCall(settings.min_time, [&] { graph->Run(c.pass); }));
  };
  double spent = 0;
  for (int round = 0; ok && round < settings.rounds; ++round) {
    if (round >= 3 && spent > 3.0) break;
    if (round % 2 == 0) run_fa2();
    run_onednn();
    if (round % 2 != 0) run_fa2();
    ratios.push_back(theirs.back() / ours.back());
    spent += theirs.back() + ours.back();
  }
  const Cost cost(*graph, c.pass);
  const double onednn_ms = Median(theirs) * 1e3, fa2_ms = Median(ours) * 1e3;
  const ContextInfo info = fa2->Info();
  row << "\"rounds\": " << ratios.size() << ", \"onednn_ms\": " << onednn_ms
      << ", \"fa2_ms\": " << fa2_ms << ", \"speedup\": " << Median(ratios)
      << ", \"fa2\": " << Quoted(info.target + "/" + info.engine)
      << ", \"fa2_workspace_bytes\": " << fa2->PeakWorkspaceBytes() << ", "
      << cost.Json() << ", \"onednn_difference\": " << prepared.difference
      << "}";
  std::cout << c.Name() << ": fa2 " << fa2_ms << " ms, oneDNN " << onednn_ms
            << " ms, " << Median(ratios) << "x; " << cost.form << ", "
            << cost.partitions << " partition(s), scratch "
            << static_cast<double>(cost.scratch + cost.between) / 1e6
            << " MB, fa2's "
            << static_cast<double>(fa2->PeakWorkspaceBytes()) / 1e6
            << " MB; differ by " << prepared.difference << std::endl;
  return row.str();
}

// After each case, so that a run which is cut short leaves what it measured.
bool Save(const Settings& settings, const std::vector<std::string>& rows) {
  std::ofstream file(settings.json);
  file << "{\"onednn\": " << Quoted(Version())
       << ", \"threads\": " << settings.cases.front().threads
       << ", \"rows\": [";
  for (size_t i = 0; i < rows.size(); ++i) {
    file << (i == 0 ? "\n  " : ",\n  ") << rows[i];
  }
  file << "\n]}\n";
  if (!file) {
    std::cerr << "bench_onednn: cannot write " << settings.json << "\n";
  }
  return static_cast<bool>(file);
}

int Main(int argc, char** argv) {
  Settings settings;
  if (!ReadArguments(argc, argv, &settings)) return 2;
  if (!Confine(settings.cases.front().threads, argv)) return 2;
  RegisterCpuDevice();
  if (settings.serve) {
    return Serve(settings.cases.front(), settings.forms);
  }
  std::cout << "oneDNN " << Version() << "\n";
  std::vector<std::string> rows;
  for (const AttentionCase& c : settings.cases) {
    rows.push_back(Measure(c, settings));
    if (!settings.json.empty() && !Save(settings, rows)) return 1;
  }
  return 0;
}

}  // namespace
}  // namespace fa2::bench

int main(int argc, char** argv) { return fa2::bench::Main(argc, argv); }
