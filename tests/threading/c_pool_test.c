// SPDX-License-Identifier: Apache-2.0

/* A C program's own threads as the pool of a context: POSIX threads, started
 * anew for each call. */
#include <pthread.h>

#include "tests/c_api/problem.h"

typedef struct Job {
  void (*worker)(void* argument, int32_t index);
  void* argument;
  int32_t index;
} Job;

static void* run_job(void* j) {
  const Job* job = j;
  job->worker(job->argument, job->index);
  return NULL;
}

enum { kMaxWorkers = 8 };

static void run_workers(void* pool_opaque, int32_t workers,
                        void (*worker)(void* argument, int32_t index),
                        void* argument) {
  pthread_t threads[kMaxWorkers];
  Job jobs[kMaxWorkers];
  CHECK(workers > 1 && workers <= kMaxWorkers);
  ++*(int*)pool_opaque;
  for (int32_t i = 0; i < workers; ++i) {
    const Job job = {worker, argument, i};
    jobs[i] = job;
  }
  for (int32_t i = 1; i < workers; ++i) {
    CHECK(pthread_create(&threads[i], NULL, run_job, &jobs[i]) == 0);
  }
  run_job(&jobs[0]);
  for (int32_t i = 1; i < workers; ++i) {
    CHECK(pthread_join(threads[i], NULL) == 0);
  }
}

static void nobody(void* pool_opaque, int32_t workers,
                   void (*worker)(void* argument, int32_t index),
                   void* argument) {
  (void)worker;
  (void)argument;
  CHECK(workers > 1);
  ++*(int*)pool_opaque;
}

static fa2_context* make_context(int32_t num_threads, const char* pool,
                                 void (*run)(void*, int32_t,
                                             void (*)(void*, int32_t), void*),
                                 int* calls) {
  fa2_context_options options = {0};
  options.struct_size = sizeof options;
  options.num_threads = num_threads;
  options.pool = pool;
  options.run_workers = run;
  options.pool_opaque = calls;
  fa2_context* context = NULL;
  CHECK_OK(fa2_context_create(&options, &context));
  return context;
}

static void expect_pool(fa2_context* context, const char* pool) {
  fa2_context_info info = {0};
  info.struct_size = sizeof info;
  CHECK_OK(fa2_context_get_info(context, &info));
  CHECK(strcmp(info.pool, pool) == 0);
}

int main(void) {
  fa2_context* alone = make_context(1, NULL, NULL, NULL);
  Problem* expected = make_problem(7);
  CHECK_OK(fa2_attention_forward(&expected->forward, alone));
  CHECK_OK(fa2_attention_backward(&expected->backward, alone));
  expect_pool(alone, "tbb");

  for (int kind = 0; kind < 2; ++kind) {
    int calls = 0;
    fa2_context* context =
        make_context(kMaxWorkers, "", kind == 0 ? run_workers : nobody, &calls);
    expect_pool(context, "caller");
    Problem* p = make_problem(7);
    CHECK(nothing_written(p));
    CHECK_OK(fa2_attention_forward(&p->forward, context));
    CHECK_OK(fa2_attention_backward(&p->backward, context));
    CHECK(calls >= 2);
    CHECK(relative_l2(p->out, expected->out, kQ) == 0);
    CHECK(memcmp(p->out, expected->out, sizeof p->out) == 0);
    CHECK(memcmp(p->lse, expected->lse, sizeof p->lse) == 0);
    CHECK(memcmp(p->dq, expected->dq, sizeof p->dq) == 0);
    CHECK(memcmp(p->dk, expected->dk, sizeof p->dk) == 0);
    CHECK(memcmp(p->dv, expected->dv, sizeof p->dv) == 0);
    free(p);
    fa2_context_destroy(context);
  }

  fa2_context* none = NULL;
  fa2_context_options options = {0};
  options.struct_size = sizeof options;
  options.pool = "threads";
  CHECK_FAILS(fa2_context_create(&options, &none), FA2_INVALID_ARGUMENT,
              "'threads'");
  options.pool = "tbb";
  options.run_workers = nobody;
  CHECK_FAILS(fa2_context_create(&options, &none), FA2_INVALID_ARGUMENT,
              "thread_pool");
  CHECK(none == NULL);

  free(expected);
  fa2_context_destroy(alone);
  return g_failures != 0;
}
