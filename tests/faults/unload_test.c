/* SPDX-License-Identifier: Apache-2.0 */

/* The shared library is loaded, computes on several threads, and is unloaded,
 * again and again: nothing of it may run later.
 *   unload_test LIBRARY
 * The calls are those of fa2_c.h, found by name. */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "fa2/fa2_c.h"

enum { kRows = 300, kDim = 16, kHeads = 4 };

static float q[kHeads * kRows * kDim], out[kHeads * kRows * kDim];
static float lse[kHeads * kRows];

/* What all calls must give: all keys and values are alike. */
static int Computes(void* library) {
  fa2_status (*create)(const fa2_context_options*, fa2_context**);
  void (*destroy)(fa2_context*);
  fa2_status (*forward)(const fa2_attention_forward_args*, fa2_context*);
  *(void**)&create = dlsym(library, "fa2_context_create");
  *(void**)&destroy = dlsym(library, "fa2_context_destroy");
  *(void**)&forward = dlsym(library, "fa2_attention_forward");
  if (!create || !destroy || !forward) return 0;

  fa2_context_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.num_threads = 3;
  fa2_context* context = NULL;
  if (create(&options, &context) != FA2_OK) return 0;

  fa2_attention_forward_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  const int64_t sizes[4] = {1, kHeads, kRows, kDim};
  const int64_t strides[4] = {kHeads * kRows * kDim, kRows * kDim, kDim, 1};
  fa2_const_tensor in;
  memset(&in, 0, sizeof in);
  in.data = q;
  in.dtype = FA2_F32;
  memcpy(in.sizes, sizes, sizeof sizes);
  memcpy(in.strides, strides, sizeof strides);
  args.q = args.k = args.v = in;
  args.out.data = out;
  args.out.dtype = FA2_F32;
  memcpy(args.out.sizes, sizes, sizeof sizes);
  memcpy(args.out.strides, strides, sizeof strides);
  args.lse.data = lse;
  args.lse.dtype = FA2_F32;
  args.lse.sizes[0] = 1;
  args.lse.sizes[1] = kHeads;
  args.lse.sizes[2] = kRows;
  args.lse.sizes[3] = 1;
  args.lse.strides[0] = kHeads * kRows;
  args.lse.strides[1] = kRows;
  args.lse.strides[2] = args.lse.strides[3] = 1;
  /* On a context of its own, then on the library's. */
  int good = forward(&args, context) == FA2_OK;
  destroy(context);
  good = good && forward(&args, NULL) == FA2_OK;
  for (int i = 0; i < kHeads * kRows * kDim; ++i) {
    good = good && fabsf(out[i] - 0.5f) < 1e-5f;
  }
  return good;
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  alarm(120);
  for (int i = 0; i < kHeads * kRows * kDim; ++i) q[i] = 0.5f;
  for (int n = 0; n < 5; ++n) {
    void* const library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
      fprintf(stderr, "%s\n", dlerror());
      return 1;
    }
    memset(out, 0, sizeof out);
    if (!Computes(library)) {
      fprintf(stderr, "load %d: wrong results\n", n);
      return 1;
    }
    if (dlclose(library) != 0) {
      fprintf(stderr, "%s\n", dlerror());
      return 1;
    }
    usleep(20000); /* time for what would still run */
  }
  return 0;
}
