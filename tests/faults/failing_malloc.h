// SPDX-License-Identifier: Apache-2.0

// malloc and its relatives, of the whole process, that fail when told to.
#ifndef FA2_TESTS_FAULTS_FAILING_MALLOC_H_
#define FA2_TESTS_FAULTS_FAILING_MALLOC_H_

#include <cstdint>

namespace fa2::test {

enum class Failing { kOne, kAllFrom };

// From now on the n-th allocation (0: the next one) on any thread fails, alone
// or with all after it.
void FailAllocation(int64_t n, Failing failing);

// Ends that, and returns how many allocations failed.
int64_t StopFailing();

// Allocations that have not been freed.
int64_t LiveAllocations();

}  // namespace fa2::test

#endif  // FA2_TESTS_FAULTS_FAILING_MALLOC_H_
