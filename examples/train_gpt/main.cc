// SPDX-License-Identifier: Apache-2.0

// Trains a small GPT on the bytes of a text.
//
//   train_gpt [--text FILE] [--steps N] [--threads N] ...      see --help
//   train_gpt --check-gradients      compares gradients with finite differences
//
// With its defaults it reaches 1.5 nats a byte in 300 steps, in 15 s on two
// cores of Emerald Rapids with OPENBLAS_CORETYPE=SkylakeX. (OpenBLAS takes old
// kernels on a CPU newer than itself; the first line then names Prescott.) The
// losses do not depend on the number of threads.
//
// Exit code: 0; 1 when --expect-loss is missed or a gradient is wrong; 2 for
// bad arguments.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <iomanip>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "examples/train_gpt/data.h"
#include "examples/train_gpt/gradient_check.h"
#include "examples/train_gpt/linear.h"
#include "examples/train_gpt/model.h"
#include "examples/train_gpt/optimizer.h"
#include "fa2/context.h"

namespace train_gpt {
namespace {

struct Options {
  std::string text = "/usr/share/common-licenses/GPL-3";
  ModelConfig model;
  AdamWOptions optimizer;
  int threads = 0;
  uint64_t seed = 1;
  int64_t log_every = 10;
  double expect_loss = 0;  // 0: none
  bool check_gradients = false;
};

// Steps whose mean is the loss that a run has reached.
constexpr size_t kLastSteps = 20;

void AddOptions(CLI::App* app, Options* o) {
  const auto positive = CLI::Range(int64_t{1}, int64_t{1} << 31);
  app->add_option("--text", o->text, "File whose bytes are learnt")
      ->capture_default_str();
  app->add_option("--steps", o->optimizer.steps, "Steps of training")
      ->check(positive)
      ->capture_default_str();
  app->add_option("--layers", o->model.layers, "Layers")
      ->check(positive)
      ->capture_default_str();
  app->add_option("--dim", o->model.dim, "Width of the model")
      ->check(positive)
      ->capture_default_str();
  app->add_option("--heads", o->model.heads, "Query heads, a divisor of dim")
      ->check(positive)
      ->capture_default_str();
  app->add_option("--kv-heads", o->model.kv_heads,
                  "Key and value heads, a divisor of heads")
      ->check(positive)
      ->capture_default_str();
  app->add_option("--sequence", o->model.sequence, "Bytes of a sample")
      ->check(positive)
      ->capture_default_str();
  app->add_option("--batch", o->model.batch, "Samples of a step")
      ->check(positive)
      ->capture_default_str();
  app->add_option("--learning-rate", o->optimizer.learning_rate,
                  "Highest learning rate")
      ->capture_default_str();
  app->add_option("--threads", o->threads,
                  "Threads; 0: FA2_NUM_THREADS or all cores")
      ->capture_default_str();
  app->add_option("--seed", o->seed, "Of weights and samples")
      ->capture_default_str();
  app->add_option("--log-every", o->log_every, "Steps from line to line")
      ->check(positive)
      ->capture_default_str();
  app->add_option("--expect-loss", o->expect_loss,
                  "Fail unless the mean loss of the last 20 steps is at most "
                  "this");
  app->add_flag("--check-gradients", o->check_gradients,
                "Compare gradients with finite differences instead");
}

// What the options must be to each other; empty if all is well.
std::string Mistake(const ModelConfig& m, int64_t text_size) {
  if (m.dim % m.heads != 0) {
    return "--heads is " + std::to_string(m.heads) +
           "; it must divide --dim, " + std::to_string(m.dim);
  }
  if (m.heads % m.kv_heads != 0) {
    return "--kv-heads is " + std::to_string(m.kv_heads) +
           "; it must divide --heads, " + std::to_string(m.heads);
  }
  if (text_size <= m.sequence) {
    return "the text has " + std::to_string(text_size) +
           " bytes; it must have more than --sequence, " +
           std::to_string(m.sequence);
  }
  return "";
}

int Train(const Options& o, const Text& text, Model* model,
          std::mt19937_64* random) {
  using Clock = std::chrono::steady_clock;
  AdamW optimizer(o.optimizer, model->parameters());
  std::vector<double> losses;
  Clock::time_point last_line = Clock::now();
  int64_t steps_since = 0;
  for (int64_t step = 1; step <= o.optimizer.steps; ++step) {
    const Batch batch = text.Sample(o.model.batch, o.model.sequence, random);
    losses.push_back(model->LossAndGradients(batch));
    optimizer.Step(&model->parameters());
    ++steps_since;
    if (step % o.log_every == 0 || step == o.optimizer.steps) {
      const Clock::time_point now = Clock::now();
      const double seconds =
          std::chrono::duration<double>(now - last_line).count();
      const double tokens = static_cast<double>(steps_since * o.model.tokens());
      std::cout << "step " << std::setw(5) << step << "  loss " << std::fixed
                << std::setprecision(6) << losses.back() << "  "
                << std::setprecision(0) << tokens / seconds << " tokens/s"
                << std::endl;
      last_line = now;
      steps_since = 0;
    }
  }
  const size_t count = std::min(kLastSteps, losses.size());
  double mean = 0;
  for (size_t i = losses.size() - count; i < losses.size(); ++i) {
    mean += losses[i] / static_cast<double>(count);
  }
  std::cout << "mean loss of the last " << count << " steps: " << std::fixed
            << std::setprecision(3) << mean
            << " nats a byte (before: " << losses.front() << ")\n";
  if (o.expect_loss > 0 && !(mean <= o.expect_loss)) {
    std::cout << "expected at most " << o.expect_loss << '\n';
    return 1;
  }
  return 0;
}

int Run(const Options& o) {
  const Text text(o.text);
  const std::string mistake = Mistake(o.model, text.size());
  if (!mistake.empty()) {
    std::cerr << "train_gpt: " << mistake << '\n';
    return 2;
  }
  fa2::ContextOptions context_options;
  context_options.num_threads = o.threads;
  std::unique_ptr<fa2::Context> context;
  const fa2::Status status = fa2::Context::Create(context_options, &context);
  if (!status.ok()) {
    std::cerr << "train_gpt: " << status.message() << '\n';
    return 2;
  }
  const fa2::ContextInfo info = context->Info();
  const Workers workers(info.num_threads);
  std::mt19937_64 random(o.seed);
  Model model(o.model, &random, context.get(), &workers);
  std::cout << model.ParameterCount() << " parameters, " << text.size()
            << " bytes of text, " << o.model.tokens() << " tokens a step, "
            << info.num_threads << " threads, " << info.target
            << ", OpenBLAS for " << workers.BlasName() << std::endl;
  if (!o.check_gradients) return Train(o, text, &model, &random);
  const Batch batch = text.Sample(o.model.batch, o.model.sequence, &random);
  return CheckGradients(&model, batch, &std::cout) ? 0 : 1;
}

}  // namespace
}  // namespace train_gpt

int main(int argc, char** argv) {
  train_gpt::Options options;
  CLI::App app("Trains a small GPT on the bytes of a text with fa2's kernels.");
  train_gpt::AddOptions(&app, &options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  try {
    return train_gpt::Run(options);
  } catch (const std::exception& error) {
    std::cerr << "train_gpt: " << error.what() << '\n';
    return 2;
  }
}
