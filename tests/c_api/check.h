// SPDX-License-Identifier: Apache-2.0

/* The few checks that a test in C needs. */
#ifndef FA2_TESTS_C_API_CHECK_H_
#define FA2_TESTS_C_API_CHECK_H_

#include <fa2/fa2_c.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int g_failures = 0;

/* A check in a loop over elements would else fill the log. */
enum { kMaxFailures = 20 };

#define CHECK(condition)                                                \
  do {                                                                  \
    if (!(condition)) {                                                 \
      fprintf(stderr, "%s:%d: failed: %s (last error: %s)\n", __FILE__, \
              __LINE__, #condition, fa2_last_error());                  \
      if (++g_failures >= kMaxFailures) exit(1);                        \
    }                                                                   \
  } while (0)

#define CHECK_OK(call) CHECK((call) == FA2_OK && *fa2_last_error() == '\0')

/* The call fails with this status, and its sentence holds this text. */
#define CHECK_FAILS(call, status, text)               \
  do {                                                \
    CHECK((call) == (status));                        \
    CHECK(strstr(fa2_last_error(), (text)) != NULL);  \
    CHECK(strstr(fa2_last_error(), "must") != NULL || \
          (status) != FA2_INVALID_ARGUMENT);          \
  } while (0)

#endif /* FA2_TESTS_C_API_CHECK_H_ */
