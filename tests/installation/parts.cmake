# SPDX-License-Identifier: Apache-2.0
# Configures the project where all but the compiler, Highway and TBB is missing: it says what it leaves out, and refuses
# what was asked for by name.
#   cmake -DSOURCE_DIR= -DWORK_DIR= -DGENERATOR= -DC_COMPILER= -DCXX_COMPILER= -P parts.cmake
set(configure ${CMAKE_COMMAND} -S ${SOURCE_DIR} -B ${WORK_DIR} -G ${GENERATOR} -DCMAKE_C_COMPILER=${C_COMPILER}
              -DCMAKE_CXX_COMPILER=${CXX_COMPILER})
foreach(package GTest nlohmann_json benchmark CLI11 fmt PkgConfig)
  list(APPEND configure -DCMAKE_DISABLE_FIND_PACKAGE_${package}=ON)
endforeach()

file(REMOVE_RECURSE ${WORK_DIR})
execute_process(COMMAND ${configure} OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE result)
if(result)
  message(FATAL_ERROR "configuring with Highway and TBB alone failed:\n${output}")
endif()
foreach(line "without tests: GTest, nlohmann_json not found" "without benchmarks: benchmark not found"
             "without tools: CLI11, fmt, nlohmann_json not found" "without the example train_gpt: CLI11, OpenBLAS not found")
  string(FIND "${output}" "-- fa2: ${line}" at)
  if(at EQUAL -1)
    message(FATAL_ERROR "'${line}' is not in:\n${output}")
  endif()
endforeach()

foreach(part TESTS BENCHMARKS TOOLS)
  file(REMOVE_RECURSE ${WORK_DIR})
  execute_process(COMMAND ${configure} -DFA2_BUILD_${part}=ON OUTPUT_VARIABLE output ERROR_VARIABLE output
                  RESULT_VARIABLE result)
  if(result EQUAL 0 OR NOT output MATCHES "FA2_BUILD_${part} is ON, but the")
    message(FATAL_ERROR "FA2_BUILD_${part}=ON without its packages: status ${result}\n${output}")
  endif()
endforeach()
