# SPDX-License-Identifier: Apache-2.0
# Text files as C++ strings.

# fa2_embed(TARGET NAME FILE): writes a header beside FILE's place in the build folder, FILE with its last '.' as '_' and
# ".h" behind, that defines fa2::verify::NAME, and lets TARGET include it by its path from the project's root.
function(fa2_embed target name file)
  cmake_path(ABSOLUTE_PATH file OUTPUT_VARIABLE source)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${source})
  file(READ ${source} text)
  cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${PROJECT_SOURCE_DIR} OUTPUT_VARIABLE relative)
  string(REGEX REPLACE "\\.([a-z]+)$" "_\\1.h" header ${relative})
  set(output ${PROJECT_BINARY_DIR}/embedded/${header})
  file(CONFIGURE OUTPUT ${output} @ONLY CONTENT
"// Made of @relative@.
#pragma once
namespace fa2::verify {
inline constexpr char @name@[] = R\"embedded(@text@)embedded\";
}  // namespace fa2::verify
")
  target_include_directories(${target} PRIVATE ${PROJECT_BINARY_DIR}/embedded)
endfunction()
