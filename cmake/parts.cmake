# SPDX-License-Identifier: Apache-2.0
# What is built beside the library: each part is ON, OFF or AUTO, which builds it where all that it needs is there and
# otherwise says what is missing.

# fa2_part(NAME DESCRIPTION NEEDS...): makes the cache entry FA2_BUILD_NAME, AUTO at top level and OFF in another project,
# and the variable FA2_BUILD_NAME of the caller, ON or OFF. NEEDS are packages for find_package.
function(fa2_part name description)
  set(option FA2_BUILD_${name})
  set(default OFF)
  if(PROJECT_IS_TOP_LEVEL)
    set(default AUTO)
  endif()
  set(${option} ${default} CACHE STRING "Build the ${description}: ON, OFF, or AUTO (where all that they need is found)")
  set_property(CACHE ${option} PROPERTY STRINGS AUTO ON OFF)
  set(wanted ${${option}})
  string(TOUPPER "${wanted}" wanted)
  if(NOT wanted)
    set(${option} OFF PARENT_SCOPE)
    return()
  endif()

  set(missing "")
  foreach(need IN LISTS ARGN)
    find_package(${need} QUIET)
    if(NOT ${need}_FOUND)
      list(APPEND missing ${need})
    endif()
  endforeach()
  list(JOIN missing ", " missing)
  if(missing AND wanted STREQUAL "AUTO")
    message(STATUS "fa2: without ${description}: ${missing} not found (${option}=ON makes that an error)")
    set(${option} OFF PARENT_SCOPE)
  elseif(missing)
    message(FATAL_ERROR "${option} is ${${option}}, but the ${description} need ${missing}, not found; "
                        "install that, or leave ${option} at AUTO or OFF")
  else()
    set(${option} ON PARENT_SCOPE)
  endif()
endfunction()
