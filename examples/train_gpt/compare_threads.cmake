# SPDX-License-Identifier: Apache-2.0
# Runs train_gpt on 1, 2 and 3 threads: every line must be the same but for the speeds.
foreach(threads 1 2 3)
  execute_process(
    COMMAND ${TRAIN_GPT} ${ARGUMENTS} --threads=${threads}
    OUTPUT_VARIABLE output
    RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "train_gpt --threads=${threads} failed: ${result}")
  endif()
  string(REGEX MATCHALL "loss [0-9.]+" losses "${output}")
  list(LENGTH losses count)
  if(count LESS 20)
    message(FATAL_ERROR "${count} losses in:\n${output}")
  endif()
  if(threads EQUAL 1)
    set(expected "${losses}")
  elseif(NOT losses STREQUAL expected)
    message(FATAL_ERROR "${threads} threads: ${losses}\n1 thread: ${expected}")
  endif()
endforeach()
