# SPDX-License-Identifier: Apache-2.0
# Run by a build: writes OUTPUT, a header that defines FA2_REVISION, where the revision of the sources in SOURCE has changed.
cmake_minimum_required(VERSION 3.25)
execute_process(
  COMMAND git -C ${SOURCE} describe --always --dirty --abbrev=9
  OUTPUT_VARIABLE revision
  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT revision)
  set(revision unknown)
endif()
file(CONFIGURE OUTPUT ${OUTPUT} @ONLY CONTENT "#pragma once
#define FA2_REVISION \"@revision@\"
")
