# SPDX-License-Identifier: Apache-2.0
# See CMakeLists.txt. FLAGS are the compiler flags of the library's build: a sanitizer must be in all
# or none of what is linked.
cmake_minimum_required(VERSION 3.25)
set(prefix ${WORK_DIR}/prefix)
file(REMOVE_RECURSE ${WORK_DIR})

function(run what)
  message(STATUS "${what}")
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    string(REPLACE ";" " " command "${ARGN}")
    message(FATAL_ERROR "${what} failed (${result}): ${command}\n${output}")
  endif()
endfunction()

# A prefix for each kind, so that a linker given -lfa2 has no choice.
run("Install" ${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${prefix} --component development)
foreach(kind IN LISTS KINDS)
  file(COPY ${prefix}/ DESTINATION ${prefix}-${kind})
endforeach()
file(GLOB archives ${prefix}-shared/${LIBDIR}/*.a)
file(GLOB shared_objects ${prefix}-static/${LIBDIR}/*.so*)
if(archives OR shared_objects)
  file(REMOVE ${archives} ${shared_objects})
endif()

set(c_compiler ${C_COMPILER})
set(cpp_compiler ${CXX_COMPILER})
set(c_source c/consumer.c)
set(cpp_source cpp/consumer.cc)
set(c_standard -std=c99)
set(cpp_standard -std=c++17)
separate_arguments(flags UNIX_COMMAND "${FLAGS}")

foreach(kind IN LISTS KINDS)
  foreach(language c cpp)
    # Both kinds lie in `prefix`: COMPONENTS chooses.
    set(build ${WORK_DIR}/find_package-${kind}-${language})
    run("find_package, ${kind}, ${language}: configure"
        ${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/${language} -B ${build} -G ${GENERATOR}
        -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=${prefix} -DCMAKE_C_COMPILER=${C_COMPILER}
        -DCMAKE_CXX_COMPILER=${CXX_COMPILER} -DCMAKE_C_FLAGS=${FLAGS} -DCMAKE_CXX_FLAGS=${FLAGS}
        -DFA2_KIND=${kind} -DFA2_EXPECTED_VERSION=${VERSION})
    run("find_package, ${kind}, ${language}: build" ${CMAKE_COMMAND} --build ${build})
    run("find_package, ${kind}, ${language}: run" ${build}/consumer ${VERSION})

    if(NOT PKG_CONFIG)
      continue()
    endif()
    set(ENV{PKG_CONFIG_PATH} ${prefix}-${kind}/${LIBDIR}/pkgconfig)
    set(query --cflags --libs)
    if(kind STREQUAL "static")
      list(APPEND query --static)
    endif()
    execute_process(COMMAND ${PKG_CONFIG} ${query} fa2 OUTPUT_VARIABLE arguments COMMAND_ERROR_IS_FATAL ANY)
    separate_arguments(arguments UNIX_COMMAND "${arguments}")
    set(consumer ${WORK_DIR}/pkg-config-${kind}-${language})
    run("pkg-config, ${kind}, ${language}: build"
        ${${language}_compiler} ${${language}_standard} ${flags}
        ${CMAKE_CURRENT_LIST_DIR}/${${language}_source} -o ${consumer} ${arguments}
        -Wl,-rpath,${prefix}-${kind}/${LIBDIR})
    run("pkg-config, ${kind}, ${language}: run" ${consumer} ${VERSION})
  endforeach()
endforeach()
