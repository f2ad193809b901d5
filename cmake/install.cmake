# SPDX-License-Identifier: Apache-2.0
# `cmake --install`: headers, the library, find_package(fa2) and pkg-config.
#
# A static and a shared library may be installed into one prefix (libraries.cmake): each brings its
# own file of targets, and fa2-config.cmake chooses. Targets of the export set fa2-targets come out as
# fa2::NAME. All of it is the component "development", which can be installed on its own.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

if(BUILD_SHARED_LIBS)
  set(kind shared)
  set(twin_kind static)
else()
  set(kind static)
  set(twin_kind shared)
endif()
set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fa2)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/fa2 DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        COMPONENT development FILES_MATCHING PATTERN "*.h")
install(TARGETS fa2 fa2_c EXPORT fa2-targets COMPONENT development
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT fa2-targets NAMESPACE fa2:: FILE fa2-${kind}-targets.cmake DESTINATION ${config_dir}
        COMPONENT development)
if(FA2_STATIC_AND_SHARED)
  install(TARGETS fa2_twin fa2_twin_c EXPORT fa2-twin-targets COMPONENT development
          INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT fa2-twin-targets NAMESPACE fa2:: FILE fa2-${twin_kind}-targets.cmake
          DESTINATION ${config_dir} COMPONENT development)
endif()

configure_package_config_file(
  ${CMAKE_CURRENT_LIST_DIR}/fa2-config.cmake.in ${PROJECT_BINARY_DIR}/fa2-config.cmake
  INSTALL_DESTINATION ${config_dir})
write_basic_package_version_file(
  ${PROJECT_BINARY_DIR}/fa2-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fa2-config.cmake ${PROJECT_BINARY_DIR}/fa2-config-version.cmake
        DESTINATION ${config_dir} COMPONENT development)

# Paths relative to the .pc file, so that an installed tree can be moved.
cmake_path(RELATIVE_PATH CMAKE_INSTALL_PREFIX
           BASE_DIRECTORY ${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR}/pkgconfig
           OUTPUT_VARIABLE pc_prefix)
configure_file(${CMAKE_CURRENT_LIST_DIR}/fa2.pc.in ${PROJECT_BINARY_DIR}/fa2.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/fa2.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
        COMPONENT development)
