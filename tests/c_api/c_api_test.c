// SPDX-License-Identifier: Apache-2.0

/* The C interface as a C99 program sees it: results against the oracle, the
 * rules of versioned structs, statuses and sentences, workspace. */
#include <pthread.h>

#include "problem.h"

/* 3e-6: what fa2 promises for f32. */
static const double kBound = 3e-6;

static void test_version(void) {
  int major, minor, patch;
  CHECK(sscanf(fa2_version_string(), "%d.%d.%d", &major, &minor, &patch) == 3);
  CHECK(fa2_version() == (uint32_t)(major * 1000000 + minor * 1000 + patch));
  CHECK(strcmp(fa2_status_string(FA2_OK), "ok") == 0);
  CHECK(strcmp(fa2_status_string(FA2_OUT_OF_MEMORY), "out of memory") == 0);
  CHECK(strcmp(fa2_status_string(FA2_INVALID_ARGUMENT), "invalid argument") ==
        0);
  CHECK(strcmp(fa2_status_string(FA2_UNSUPPORTED), "unsupported") == 0);
  CHECK(strcmp(fa2_status_string(FA2_INTERNAL), "internal error") == 0);
  CHECK(strcmp(fa2_status_string((fa2_status)99), "unknown status") == 0);
}

static void test_attention(fa2_context* context) {
  Problem* p = make_problem(1);
  Problem* expected = make_problem(1);
  CHECK_OK(fa2_attention_reference_forward(&expected->forward));
  CHECK_OK(fa2_attention_reference_backward(&expected->backward));
  CHECK_OK(fa2_attention_forward(&p->forward, context));
  CHECK_OK(fa2_attention_backward(&p->backward, context));
  CHECK(relative_l2(p->out, expected->out, kQ) <= kBound);
  CHECK(relative_l2(p->lse, expected->lse, kRows) <= kBound);
  CHECK(relative_l2(p->dq, expected->dq, kQ) <= kBound);
  CHECK(relative_l2(p->dk, expected->dk, kKv) <= kBound);
  CHECK(relative_l2(p->dv, expected->dv, kKv) <= kBound);

  /* Every option arrives: each changes the result as it changes the oracle's.
   */
  p->options.has_scale = expected->options.has_scale = 1;
  p->options.scale = expected->options.scale = 0.7;
  p->options.has_window = expected->options.has_window = 1;
  p->options.window_left = expected->options.window_left = 5;
  p->options.window_right = expected->options.window_right = -1;
  p->options.softcap = expected->options.softcap = 1.5;
  p->backward.accumulate_dk = expected->backward.accumulate_dk = 1;
  CHECK_OK(fa2_attention_reference_forward(&expected->forward));
  CHECK_OK(fa2_attention_reference_backward(&expected->backward));
  CHECK(relative_l2(p->out, expected->out, kQ) > 0.01);
  CHECK_OK(fa2_attention_forward(&p->forward, context));
  CHECK_OK(fa2_attention_backward(&p->backward, context));
  CHECK(relative_l2(p->out, expected->out, kQ) <= kBound);
  CHECK(relative_l2(p->dq, expected->dq, kQ) <= kBound);
  CHECK(relative_l2(p->dk, expected->dk, kKv) <= kBound);
  CHECK(relative_l2(p->dv, expected->dv, kKv) <= kBound);
  free(p);
  free(expected);
}

static void test_delta(fa2_context* context) {
  Problem* p = make_problem(2);
  const fa2_tensor delta = fa2_dense_rows(p->delta, FA2_F32, kB, kHq, kNq);
  fill(p->out, kQ, &(uint32_t){3});
  CHECK_OK(fa2_attention_delta(&p->backward.out, &p->backward.dout, &delta,
                               context));
  for (int row = 0; row < kRows; ++row) {
    double sum = 0.0, magnitude = 0.0;
    for (int d = 0; d < kD; ++d) {
      const double term = (double)p->out[row * kD + d] * p->dout[row * kD + d];
      sum += term;
      magnitude += fabs(term);
    }
    /* f32: half an ulp for each of kD + 1 roundings. */
    CHECK(fabs(p->delta[row] - sum) <= (kD + 1) * 0x1p-24 * magnitude);
  }
  CHECK_FAILS(fa2_attention_delta(NULL, &p->backward.dout, &delta, context),
              FA2_INVALID_ARGUMENT, "out is NULL");
  free(p);
}

static void test_keep_mask(fa2_context* context) {
  enum { kElements = 3 * 5 * 7 };
  unsigned char keep[kElements];
  int kept = 0;
  const fa2_tensor view = fa2_dense(keep, FA2_BOOL, 1, 3, 5, 7);
  memset(keep, 2, sizeof keep);
  CHECK_OK(fa2_philox_keep_mask(0.0, 1248, 0, &view, context));
  for (int i = 0; i < kElements; ++i) CHECK(keep[i] == 1);
  CHECK_OK(fa2_philox_keep_mask(0.5, 1248, 0, &view, context));
  for (int i = 0; i < kElements; ++i) kept += keep[i];
  /* Four standard deviations of a fair coin. */
  CHECK(abs(2 * kept - kElements) <= 4 * 10.3);
  CHECK_FAILS(fa2_philox_keep_mask(1.5, 0, 0, &view, context),
              FA2_INVALID_ARGUMENT, "dropout_p");
  CHECK_FAILS(fa2_philox_keep_mask(0.5, 0, 0, NULL, context),
              FA2_INVALID_ARGUMENT, "keep is NULL");
}

/* A struct of a later version: more bytes behind what this library knows. */
typedef struct LaterOptions {
  fa2_attention_options known;
  uint64_t added[2];
} LaterOptions;

static void test_struct_sizes(fa2_context* context) {
  Problem* p = make_problem(4);
  LaterOptions later;
  fa2_attention_options older;
  float out[kQ];
  CHECK_OK(fa2_attention_forward(&p->forward, context));
  memcpy(out, p->out, sizeof out);

  /* Larger, with nothing set behind: the same result. */
  memset(&later, 0, sizeof later);
  later.known = p->options;
  later.known.struct_size = sizeof later;
  p->forward.options = &later.known;
  CHECK_OK(fa2_attention_forward(&p->forward, context));
  CHECK(memcmp(out, p->out, sizeof out) == 0);
  later.added[1] = 1;
  CHECK_FAILS(fa2_attention_forward(&p->forward, context), FA2_UNSUPPORTED,
              "options.struct_size");

  /* Smaller: what an older caller does not have is not read. */
  older = p->options;
  memset(&older.softcap, 0xFF,
         sizeof older - offsetof(fa2_attention_options, softcap));
  older.struct_size = offsetof(fa2_attention_options, softcap);
  p->forward.options = &older;
  CHECK_OK(fa2_attention_forward(&p->forward, context));
  CHECK(memcmp(out, p->out, sizeof out) == 0);
  p->forward.options = NULL;
  CHECK_OK(fa2_attention_forward(&p->forward, context));
  CHECK(memcmp(out, p->out, sizeof out) != 0);

  p->forward.struct_size = offsetof(fa2_attention_forward_args, lse);
  CHECK_OK(fa2_attention_forward(&p->forward, context));
  free(p);

  p = make_problem(5);
  const size_t wrong[] = {0, 4, sizeof p->forward - sizeof(size_t) / 2, 8,
                          SIZE_MAX};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    p->forward.struct_size = p->backward.struct_size = wrong[i];
    CHECK_FAILS(fa2_attention_forward(&p->forward, context),
                FA2_INVALID_ARGUMENT, "args.struct_size");
    CHECK_FAILS(fa2_attention_backward(&p->backward, context),
                FA2_INVALID_ARGUMENT, "args.struct_size");
  }
  CHECK_FAILS(fa2_attention_forward(NULL, context), FA2_INVALID_ARGUMENT,
              "args is NULL");
  CHECK_FAILS(fa2_attention_backward(NULL, context), FA2_INVALID_ARGUMENT,
              "args is NULL");
  CHECK(nothing_written(p));
  free(p);
}

static void test_wrong_values(fa2_context* context) {
  Problem* p = make_problem(6);
  size_t bytes = 0;
  p->options.causal = 3;
  CHECK_FAILS(fa2_attention_forward(&p->forward, context), FA2_INVALID_ARGUMENT,
              "causal is 3");
  p->options.causal = -1;
  CHECK_FAILS(fa2_attention_backward(&p->backward, context),
              FA2_INVALID_ARGUMENT, "causal is -1");
  p->options.causal = 0;
  p->options.precision = 7;
  CHECK_FAILS(fa2_attention_backward(&p->backward, context),
              FA2_INVALID_ARGUMENT, "precision is 7");
  p->options.precision = 0;
  p->forward.k.dtype = 42;
  CHECK_FAILS(fa2_attention_forward(&p->forward, context), FA2_INVALID_ARGUMENT,
              "k.dtype is 42");
  p->forward.k.dtype = FA2_F32;
  p->forward.out.reserved = 1;
  CHECK_FAILS(fa2_attention_forward(&p->forward, context), FA2_INVALID_ARGUMENT,
              "out.reserved is 1");
  p->backward.dv.dtype = FA2_I32;
  CHECK_FAILS(fa2_attention_backward(&p->backward, context),
              FA2_INVALID_ARGUMENT, "dv");
  p->backward.dv.dtype = FA2_F32;
  p->backward.k.sizes[3] = kD + 1;
  CHECK_FAILS(fa2_attention_backward(&p->backward, context),
              FA2_INVALID_ARGUMENT, "k");
  p->backward.k.sizes[3] = kD;
  CHECK_FAILS(fa2_attention_backward_workspace(&p->backward, NULL, context),
              FA2_INVALID_ARGUMENT, "bytes is NULL");
  CHECK(nothing_written(p));
  CHECK_OK(fa2_attention_backward_workspace(&p->backward, &bytes, context));
  free(p);
}

static void test_context(void) {
  fa2_context_options options = {0};
  fa2_context* context = NULL;
  fa2_context_info info;
  memset(&info, 0xFF, sizeof info);
  options.struct_size = sizeof options;
  options.num_threads = 2;
  CHECK_OK(fa2_context_create(&options, &context));
  info.struct_size = sizeof info;
  CHECK_OK(fa2_context_get_info(context, &info));
  CHECK(info.num_threads == 2);
  CHECK(strlen(info.target) > 0 && strstr(info.targets, info.target) != NULL);
  CHECK(strlen(info.engine) > 0 && strstr(info.engines, info.engine) != NULL);
  CHECK(info.workspace_bytes == 0 && info.allocation_count == 0);

  /* An older caller's info: nothing behind its end is written. */
  memset(&info, 0xFF, sizeof info);
  info.struct_size = offsetof(fa2_context_info, targets);
  CHECK_OK(fa2_context_get_info(context, &info));
  CHECK(info.num_threads == 2 && info.targets[0] == (char)0xFF);
  info.struct_size = 2;
  CHECK_FAILS(fa2_context_get_info(context, &info), FA2_INVALID_ARGUMENT,
              "info.struct_size is 2");
  CHECK_FAILS(fa2_context_get_info(context, NULL), FA2_INVALID_ARGUMENT,
              "info is NULL");

  CHECK_OK(fa2_context_release_workspace(context));
  fa2_context_destroy(context);
  fa2_context_destroy(NULL);

  context = NULL;
  CHECK_FAILS(fa2_context_create(&options, NULL), FA2_INVALID_ARGUMENT,
              "context is NULL");
  options.num_threads = -1;
  CHECK_FAILS(fa2_context_create(&options, &context), FA2_INVALID_ARGUMENT,
              "num_threads is -1");
  options.num_threads = 0;
  options.max_target = "z80";
  CHECK_FAILS(fa2_context_create(&options, &context), FA2_UNSUPPORTED, "z80");
  options.max_target = NULL;
  options.engine = "abacus";
  CHECK_FAILS(fa2_context_create(&options, &context), FA2_UNSUPPORTED,
              "abacus");
  options.engine = NULL;
  options.workspace_bytes = 64;
  CHECK_FAILS(fa2_context_create(&options, &context), FA2_INVALID_ARGUMENT,
              "workspace_bytes is 64");
  CHECK(context == NULL);
}

typedef struct Counter {
  int live;
  int total;
  int refuse;
} Counter;

static void* count_allocate(void* opaque, size_t bytes, size_t alignment) {
  Counter* counter = opaque;
  void* memory = NULL;
  if (counter->refuse) return NULL;
  if (posix_memalign(&memory, alignment, bytes) != 0) return NULL;
  ++counter->live;
  ++counter->total;
  return memory;
}

static void count_release(void* opaque, void* memory, size_t bytes) {
  Counter* counter = opaque;
  (void)bytes;
  --counter->live;
  free(memory);
}

static void test_allocator(void) {
  Counter counter = {0, 0, 0};
  fa2_context_options options = {0};
  fa2_context* context = NULL;
  Problem* p = make_problem(7);
  options.struct_size = sizeof options;
  options.allocate = count_allocate;
  CHECK_FAILS(fa2_context_create(&options, &context), FA2_INVALID_ARGUMENT,
              "allocator");
  options.release = count_release;
  options.opaque = &counter;
  CHECK_OK(fa2_context_create(&options, &context));
  CHECK_OK(fa2_attention_forward(&p->forward, context));
  CHECK_OK(fa2_attention_backward(&p->backward, context));
  const int after_first = counter.total;
  CHECK(after_first > 0);
  CHECK_OK(fa2_attention_backward(&p->backward, context));
  CHECK(counter.total == after_first);
  CHECK_OK(fa2_context_release_workspace(context));
  CHECK(counter.live == 0);
  free(p);

  p = make_problem(8);
  counter.refuse = 1;
  CHECK_FAILS(fa2_attention_forward(&p->forward, context), FA2_OUT_OF_MEMORY,
              "workspace");
  CHECK_FAILS(fa2_attention_backward(&p->backward, context), FA2_OUT_OF_MEMORY,
              "workspace");
  CHECK(nothing_written(p));
  fa2_context_destroy(context);
  CHECK(counter.live == 0);
  free(p);
}

static void test_callers_workspace(void) {
  /* Beside the bytes that the query names, room to reach the alignment. */
  enum { kAlignment = 128 };
  fa2_context_options options = {0};
  fa2_context* context = NULL;
  size_t forward_bytes = 0, backward_bytes = 0;
  Problem* p = make_problem(9);
  Problem* expected = make_problem(9);
  CHECK_OK(fa2_attention_forward(&expected->forward, NULL));
  CHECK_OK(fa2_attention_backward(&expected->backward, NULL));
  CHECK_OK(fa2_attention_forward_workspace(&p->forward, &forward_bytes, NULL));
  CHECK_OK(
      fa2_attention_backward_workspace(&p->backward, &backward_bytes, NULL));
  CHECK(backward_bytes > 0);
  const size_t bytes =
      (forward_bytes > backward_bytes ? forward_bytes : backward_bytes) +
      2 * kAlignment;
  unsigned char* memory = malloc(bytes + 1);
  if (memory == NULL) abort();
  options.struct_size = sizeof options;
  options.workspace = memory + 1; /* on no boundary */
  options.workspace_bytes = bytes;
  options.allocate = count_allocate;
  options.release = count_release;
  CHECK_FAILS(fa2_context_create(&options, &context), FA2_INVALID_ARGUMENT,
              "workspace and allocate are both given");
  options.allocate = NULL;
  options.release = NULL;
  CHECK_OK(fa2_context_create(&options, &context));
  for (int repeat = 0; repeat < 2; ++repeat) {
    CHECK_OK(fa2_attention_forward(&p->forward, context));
    CHECK_OK(fa2_attention_backward(&p->backward, context));
    CHECK_OK(fa2_context_release_workspace(context));
  }
  CHECK(memcmp(p->dq, expected->dq, sizeof p->dq) == 0);
  CHECK(memcmp(p->dk, expected->dk, sizeof p->dk) == 0);
  fa2_context_destroy(context);
  free(p);

  p = make_problem(9);
  options.workspace_bytes = backward_bytes / 2;
  CHECK_OK(fa2_context_create(&options, &context));
  CHECK_FAILS(fa2_attention_backward(&p->backward, context), FA2_OUT_OF_MEMORY,
              "workspace");
  CHECK(nothing_written(p));
  fa2_context_destroy(context);
  free(memory);
  free(p);
  free(expected);
}

/* Each thread has its own sentence. */
static void* fail_elsewhere(void* unused) {
  (void)unused;
  CHECK(*fa2_last_error() == '\0');
  CHECK_FAILS(fa2_attention_forward(NULL, NULL), FA2_INVALID_ARGUMENT,
              "args is NULL");
  return NULL;
}

static void test_messages(void) {
  pthread_t thread;
  fa2_context_info info = {0};
  CHECK(fa2_context_get_info(NULL, &info) == FA2_INVALID_ARGUMENT);
  CHECK(strstr(fa2_last_error(), "info.struct_size") != NULL);
  CHECK(pthread_create(&thread, NULL, fail_elsewhere, NULL) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(strstr(fa2_last_error(), "info.struct_size") != NULL);
  info.struct_size = sizeof info;
  CHECK_OK(fa2_context_get_info(NULL, &info));
}

int main(void) {
  fa2_context* context = NULL;
  CHECK_OK(fa2_context_create(NULL, &context));
  test_version();
  test_attention(context);
  test_attention(NULL);
  test_delta(context);
  test_keep_mask(context);
  test_struct_sizes(context);
  test_wrong_values(context);
  test_context();
  test_allocator();
  test_callers_workspace();
  test_messages();
  fa2_context_destroy(context);
  if (g_failures != 0) fprintf(stderr, "%d checks failed\n", g_failures);
  return g_failures == 0 ? 0 : 1;
}
