# SPDX-License-Identifier: Apache-2.0
# The library's two kinds and its C interface.
#
# fa2 is static or shared as BUILD_SHARED_LIBS says; fa2_twin is the other kind, linked from the same
# objects. Installed, either comes out as fa2::fa2, and fa2-config.cmake chooses.

# fa2::c: the same library for C. It passes on no C++ requirement, so that a project with C alone can
# use it.
function(fa2_add_c_target name library export_name)
  add_library(${name} INTERFACE)
  target_include_directories(
    ${name} INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>)
  target_link_libraries(${name} INTERFACE $<LINK_ONLY:${library}>)
  get_target_property(type ${library} TYPE)
  if(type STREQUAL "STATIC_LIBRARY")
    # A C compiler's link line lacks what C++ code needs.
    set(runtime ${CMAKE_CXX_IMPLICIT_LINK_LIBRARIES})
    list(FILTER runtime INCLUDE REGEX "^(stdc\\+\\+|c\\+\\+|m)$")
    list(REMOVE_DUPLICATES runtime)
    target_link_libraries(${name} INTERFACE ${runtime})
  endif()
  set_target_properties(${name} PROPERTIES EXPORT_NAME ${export_name})
endfunction()

function(fa2_set_symbols library)
  get_target_property(type ${library} TYPE)
  if(type STREQUAL "SHARED_LIBRARY" AND NOT APPLE)
    target_link_options(${library} PRIVATE "LINKER:--version-script=${PROJECT_SOURCE_DIR}/src/fa2.version")
    set_property(TARGET ${library} APPEND PROPERTY LINK_DEPENDS ${PROJECT_SOURCE_DIR}/src/fa2.version)
    # dlclose must not take oneTBB away from under its threads, which go on after the last call.
    target_link_options(${library} PRIVATE LINKER:-z,nodelete)
  endif()
endfunction()

fa2_add_c_target(fa2_c fa2 c)
add_library(fa2::c ALIAS fa2_c)
fa2_set_symbols(fa2)

if(FA2_STATIC_AND_SHARED)
  if(BUILD_SHARED_LIBS)
    add_library(fa2_twin STATIC $<TARGET_OBJECTS:fa2>)
  else()
    add_library(fa2_twin SHARED $<TARGET_OBJECTS:fa2>)
  endif()
  foreach(property INTERFACE_COMPILE_FEATURES INTERFACE_INCLUDE_DIRECTORIES VERSION SOVERSION)
    get_target_property(value fa2 ${property})
    set_target_properties(fa2_twin PROPERTIES ${property} "${value}")
  endforeach()
  get_target_property(libraries fa2 LINK_LIBRARIES)
  target_link_libraries(fa2_twin PRIVATE ${libraries})
  set_target_properties(fa2_twin PROPERTIES OUTPUT_NAME fa2 EXPORT_NAME fa2 LINKER_LANGUAGE CXX)
  fa2_add_c_target(fa2_twin_c fa2_twin c)
  fa2_set_symbols(fa2_twin)
endif()
