// SPDX-License-Identifier: Apache-2.0

// One version: of the headers, the library, CMake's project and both
// interfaces.
#include "fa2/version.h"

#include <gtest/gtest.h>

#include <string>

#include "fa2/fa2.h"
#include "fa2/fa2_c.h"

namespace fa2::test {
namespace {

TEST(Version, HeadersAgreeWithTheProject) {
  EXPECT_STREQ(FA2_VERSION_STRING, PROJECT_VERSION);
  EXPECT_EQ(std::to_string(FA2_VERSION_MAJOR) + "." +
                std::to_string(FA2_VERSION_MINOR) + "." +
                std::to_string(FA2_VERSION_PATCH),
            FA2_VERSION_STRING);
}

TEST(Version, LibraryAgreesWithItsHeaders) {
  EXPECT_STREQ(Version(), FA2_VERSION_STRING);
  EXPECT_STREQ(fa2_version_string(), FA2_VERSION_STRING);
  EXPECT_EQ(fa2_version(), FA2_VERSION_MAJOR * 1000000u +
                               FA2_VERSION_MINOR * 1000u + FA2_VERSION_PATCH);
}

}  // namespace
}  // namespace fa2::test
