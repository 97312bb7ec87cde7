# `cmake --install`: the library, its headers, the command-line tool, and a package for
# find_package(sonicmoe CONFIG).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/sonicmoe)
set_target_properties(sonicmoe PROPERTIES VERSION ${PROJECT_VERSION}
                                          SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
install(TARGETS sonicmoe EXPORT sonicmoe-targets)
if(TARGET sonicmoe_cli)
  install(TARGETS sonicmoe_cli)
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/sonicmoe TYPE INCLUDE)
install(EXPORT sonicmoe-targets NAMESPACE sonicmoe:: DESTINATION ${package_dir})

configure_package_config_file(
  ${CMAKE_CURRENT_LIST_DIR}/sonicmoe-config.cmake.in ${PROJECT_BINARY_DIR}/sonicmoe-config.cmake
  INSTALL_DESTINATION ${package_dir})
# Before 1.0 a minor version may break the API.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/sonicmoe-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/sonicmoe-config.cmake
              ${PROJECT_BINARY_DIR}/sonicmoe-config-version.cmake DESTINATION ${package_dir})
