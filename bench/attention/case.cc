// SPDX-License-Identifier: Apache-2.0
#include "bench/attention/case.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <sstream>
#include <thread>

#include "bench/attention/block_pattern.h"

namespace fa2::bench {
namespace {

int AllCores() {
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

const char* PassName(Pass pass) {
  switch (pass) {
    case Pass::kForward:
      return "forward";
    case Pass::kBackward:
      return "backward";
    case Pass::kBoth:
      return "both";
  }
  return "";
}

bool ParseNumber(const char* begin, const char* end, int64_t* value) {
  const auto [stop, error] = std::from_chars(begin, end, *value);
  return error == std::errc() && stop == end && begin != end && *value >= 0;
}

// "N512x1024" or "N512".
bool ParseLengths(const std::string& part, AttentionCase* c) {
  const char* begin = part.data() + 1;
  const char* end = part.data() + part.size();
  const char* cross = std::find(begin, end, 'x');
  if (!ParseNumber(begin, cross, &c->queries)) return false;
  c->keys = c->queries;
  return cross == end || ParseNumber(cross + 1, end, &c->keys);
}

// "packed3000-700-8x2": lengths, some of them several times.
bool ParsePacked(const std::string& part, AttentionCase* c) {
  std::istringstream lengths(part.substr(std::string("packed").size()));
  std::string length;
  while (std::getline(lengths, length, '-')) {
    const char* begin = length.data();
    const char* end = begin + length.size();
    const char* cross = std::find(begin, end, 'x');
    int64_t rows = 0, count = 1;
    if (!ParseNumber(begin, cross, &rows)) return false;
    if (cross != end && !ParseNumber(cross + 1, end, &count)) return false;
    c->packed.insert(c->packed.end(), static_cast<size_t>(count), rows);
  }
  return !c->packed.empty();
}

// A letter or two and a number: B, H, KV, D, T.
bool ParseSize(const std::string& part, AttentionCase* c) {
  const size_t digits = part.find_first_of("0123456789");
  if (digits == std::string::npos) return false;
  int64_t value = 0;
  if (!ParseNumber(part.data() + digits, part.data() + part.size(), &value)) {
    return false;
  }
  const std::string key = part.substr(0, digits);
  if (key == "B") {
    c->batch = value;
  } else if (key == "H") {
    c->heads = value;
  } else if (key == "KV") {
    c->kv_heads = value;
  } else if (key == "D") {
    c->head_dim = value;
  } else if (key == "T") {
    c->threads = value == 0 ? AllCores() : static_cast<int>(value);
  } else if (key == "window") {
    c->window = value;
    c->causal = true;
  } else if (key == "mask") {
    c->document = value;
    c->mask = true;
  } else {
    return false;
  }
  return true;
}

// "bias", "dbias", "bias_bf16".
bool ParseBias(const std::string& part, AttentionCase* c) {
  const size_t end = part.find('_');
  const std::string word = part.substr(0, end);
  if (word != "bias" && word != "dbias") return false;
  c->bias = true;
  c->dbias = word == "dbias";
  if (end == std::string::npos) return true;
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF64}) {
    if (part.substr(end + 1) == NameOf(dtype)) {
      c->bias_dtype = dtype;
      return true;
    }
  }
  return false;
}

// "blocks_documents".
bool ParseBlocks(const std::string& part, AttentionCase* c) {
  constexpr char kPrefix[] = "blocks_";
  if (part.rfind(kPrefix, 0) != 0) return false;
  c->blocks = part.substr(sizeof kPrefix - 1);
  return BlockPattern::IsName(c->blocks);
}

bool ParseWord(const std::string& part, AttentionCase* c) {
  for (const Pass pass : {Pass::kForward, Pass::kBackward, Pass::kBoth}) {
    if (part == PassName(pass)) {
      c->pass = pass;
      return true;
    }
  }
  for (const DType dtype :
       {DType::kBF16, DType::kF16, DType::kF32, DType::kF64}) {
    if (part == NameOf(dtype)) {
      c->dtype = dtype;
      return true;
    }
  }
  if (part == "full" || part == "causal") {
    c->causal = part == "causal";
  } else if (part == "fast") {
    c->precision = Precision::kFast;
  } else if (part == "high") {
    c->precision = Precision::kHigh;
  } else if (part == "exact") {
    c->precision = Precision::kExact;
  } else if (part == "mask") {
    c->mask = true;
  } else if (part == "dropout") {
    c->dropout = true;
  } else if (part == "softcap") {
    c->softcap = true;
  } else if (part == "alibi") {
    c->alibi = true;
  } else if (part == "sinks") {
    c->sinks = true;
  } else {
    return ParseBlocks(part, c) || ParseBias(part, c);
  }
  return true;
}

std::vector<AttentionCase> DefaultSuite() {
  std::vector<AttentionCase> cases;
  AttentionCase c;
  for (const Pass pass : {Pass::kBackward, Pass::kForward}) {
    c = {};
    c.pass = pass;
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      c.dtype = dtype;
      c.heads = c.kv_heads = 4;
      c.queries = c.keys = 2048;
      for (const bool causal : {false, true}) {
        c.causal = causal;
        for (const int64_t head_dim : {64, 128, 256}) {
          c.head_dim = head_dim;
          cases.push_back(c);
        }
      }
      c.head_dim = 128;
      c.heads = c.kv_heads = 1;
      c.queries = c.keys = 8192;
      cases.push_back(c);  // causal, long
    }
    c = {};
    c.pass = pass;
    c.heads = c.kv_heads = 4;
    c.dtype = DType::kF16;
    cases.push_back(c);
    c.dtype = DType::kBF16;
    c.kv_heads = 1;  // grouped queries
    cases.push_back(c);
    c.heads = 1;  // the cost of a call
    c.queries = c.keys = 128;
    c.head_dim = 64;
    cases.push_back(c);
    c.heads = c.kv_heads = 8;
    c.queries = c.keys = 4096;
    c.head_dim = 128;
    c.threads = AllCores();
    cases.push_back(c);
  }
  return cases;
}

std::vector<AttentionCase> FullSuite() {
  std::vector<AttentionCase> cases;
  AttentionCase c;
  std::vector<int> threads = {1};
  if (AllCores() > 1) threads.push_back(AllCores());
  for (const int t : threads) {
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
        for (const int64_t head_dim : {64, 128, 256}) {
          for (const int64_t length : {256, 1024, 4096, 16384}) {
            for (const bool causal : {false, true}) {
              for (const int64_t group : {1, 4}) {
                c.threads = t;
                c.pass = pass;
                c.dtype = dtype;
                c.head_dim = head_dim;
                c.queries = c.keys = length;
                c.causal = causal;
                // About 16,384 rows, so that no case takes minutes.
                c.heads = std::clamp<int64_t>(16384 / length, 4, 16);
                c.kv_heads = c.heads / group;
                cases.push_back(c);
              }
            }
          }
        }
      }
    }
  }
  return cases;
}

// Batch x length = 16,384 tokens, heads x head dim = 2,048 (Dao 2023, section
// 4.1).
std::vector<AttentionCase> PaperSuite() {
  std::vector<AttentionCase> cases;
  AttentionCase c;
  c.threads = AllCores();
  for (const Pass pass : {Pass::kForward, Pass::kBackward, Pass::kBoth}) {
    for (const bool causal : {false, true}) {
      for (const int64_t head_dim : {64, 128}) {
        for (int64_t length = 512; length <= 16384; length *= 2) {
          c.pass = pass;
          c.causal = causal;
          c.head_dim = head_dim;
          c.heads = c.kv_heads = 2048 / head_dim;
          c.queries = c.keys = length;
          c.batch = 16384 / length;
          cases.push_back(c);
        }
      }
    }
  }
  return cases;
}

// Blanks between them.
constexpr char kOptionCases[] =
    "N2048 N2048/bias N2048/dbias N2048/bias_bf16 N2048/dbias_bf16 N2048/mask "
    "N2048/mask500 N2048/dropout N2048/softcap N2048/alibi N2048/sinks "
    "N2048/exact "
    "N8192/H1 N8192/H1/blocks_documents N8192/H1/blocks_window "
    "N8192/H1/blocks_prefix N8192/H1/blocks_strided N8192/H1/blocks_bigbird "
    "N8192/H1/blocks_random "
    "N16384/H1/causal N16384/H1/window256 B8/N512 packed512x8 B8/N512/causal "
    "packed512x8/causal N3091 packed3000-700-200-150-20-10-8x2 N3091/causal "
    "packed3000-700-200-150-20-10-8x2/causal";

std::vector<AttentionCase> OptionsSuite() {
  std::vector<AttentionCase> cases;
  for (const char* pass : {"forward", "backward"}) {
    for (const char* dtype : {"bf16", "f32"}) {
      std::istringstream all(kOptionCases);
      std::string options;
      while (all >> options) {
        AttentionCase c;
        c.heads = 4;
        std::string error;
        const std::string name =
            std::string("H4/") + pass + "/" + dtype + "/" + options;
        if (ParseCase(name, &c, &error)) cases.push_back(c);
      }
    }
  }
  return cases;
}

// Visible pairs of a query and a key.
double Pairs(const AttentionCase& c, int64_t queries, int64_t keys) {
  if (!c.blocks.empty()) return BlockPattern(c.blocks, queries, keys).pairs();
  if (c.document > 0 && std::max(queries, keys) > c.document) {
    const int64_t length = c.document;
    return Pairs(c, std::min(queries, length), std::min(keys, length)) +
           Pairs(c, std::max<int64_t>(0, queries - length),
                 std::max<int64_t>(0, keys - length));
  }
  if (c.window == 0) {
    return static_cast<double>(queries) * static_cast<double>(keys) /
           (c.causal ? 2 : 1);
  }
  double pairs = 0;
  for (int64_t i = 0; i < queries; ++i) {
    const int64_t end = std::min(keys, i + 1);
    pairs += static_cast<double>(
        std::max<int64_t>(0, end - std::max<int64_t>(0, i + 1 - c.window)));
  }
  return pairs;
}

}  // namespace

int64_t AttentionCase::TotalQueries() const {
  return packed.empty()
             ? queries
             : std::accumulate(packed.begin(), packed.end(), int64_t{0});
}

int64_t AttentionCase::TotalKeys() const {
  return packed.empty() ? keys : TotalQueries();
}

double AttentionCase::Flops() const {
  double pairs = 0;
  for (const int64_t length : packed) pairs += Pairs(*this, length, length);
  if (packed.empty()) {
    pairs = static_cast<double>(batch) * Pairs(*this, queries, keys);
  }
  const double per_pair = pass == Pass::kForward    ? 4
                          : pass == Pass::kBackward ? 10
                                                    : 14;
  return per_pair * static_cast<double>(heads) * pairs *
         static_cast<double>(head_dim);
}

std::string AttentionCase::Name() const {
  std::ostringstream name;
  name << PassName(pass) << '/' << NameOf(dtype) << "/B" << batch << "/H"
       << heads << "/KV" << kv_heads;
  if (packed.empty()) {
    name << "/N" << queries;
    if (keys != queries) name << 'x' << keys;
  }
  for (size_t i = 0; i < packed.size();) {
    size_t end = i;
    while (end < packed.size() && packed[end] == packed[i]) ++end;
    name << (i == 0 ? "/packed" : "-") << packed[i];
    if (end - i > 1) name << 'x' << end - i;
    i = end;
  }
  name << "/D" << head_dim << (causal ? "/causal" : "/full") << "/T" << threads;
  if (precision == Precision::kHigh) name << "/high";
  if (precision == Precision::kExact) name << "/exact";
  if (window > 0) name << "/window" << window;
  if (bias) {
    name << (dbias ? "/dbias" : "/bias");
    if (bias_dtype != DType::kF32) name << '_' << NameOf(bias_dtype);
  }
  if (mask) name << "/mask";
  if (document > 0) name << document;
  if (!blocks.empty()) name << "/blocks_" << blocks;
  if (dropout) name << "/dropout";
  if (softcap) name << "/softcap";
  if (alibi) name << "/alibi";
  if (sinks) name << "/sinks";
  return name.str();
}

bool ParseCase(const std::string& name, AttentionCase* result,
               std::string* error) {
  AttentionCase c;
  c.kv_heads = 0;
  std::istringstream parts(name);
  std::string part;
  while (std::getline(parts, part, '/')) {
    if (part.empty() || ParseWord(part, &c)) continue;
    if (part.rfind("packed", 0) == 0 && ParsePacked(part, &c)) continue;
    if (part[0] == 'N' ? ParseLengths(part, &c) : ParseSize(part, &c)) continue;
    *error = "case \"" + name + "\": \"" + part +
             "\" is unknown; it must be like one of forward, backward, both, "
             "bf16, f16, f32, f64, B1, H8, KV2, N2048, N512x1024, "
             "packed700-20x3, D128, full, "
             "causal, T1, T0, fast, high, exact, window256, bias, dbias, "
             "bias_bf16, mask, mask500, blocks_documents, dropout, softcap, "
             "alibi, sinks";
    return false;
  }
  if (c.kv_heads == 0) c.kv_heads = c.heads;
  *result = c;
  return true;
}

std::vector<AttentionCase> Suite(const std::string& name) {
  if (name == "default") return DefaultSuite();
  if (name == "full") return FullSuite();
  if (name == "fa2-paper") return PaperSuite();
  if (name == "options") return OptionsSuite();
  return {};
}

}  // namespace fa2::bench
