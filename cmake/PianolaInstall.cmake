# The target pianola::pianola for users of the library, and what an installation holds: the public
# headers, one static library a layer, the CMake package and the program.
get_property(pianola_layers GLOBAL PROPERTY PIANOLA_LAYERS)

add_library(pianola_library INTERFACE)
add_library(pianola::pianola ALIAS pianola_library)
set_target_properties(pianola_library PROPERTIES EXPORT_NAME pianola)
target_link_libraries(pianola_library INTERFACE pianola_generate)
target_compile_features(pianola_library INTERFACE cxx_std_20)

if(PIANOLA_INSTALL)
  include(CMakePackageConfigHelpers)
  set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/pianola)
  install(DIRECTORY include/pianola DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN *.h)
  install(TARGETS pianola_library ${pianola_layers} EXPORT pianolaTargets
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  if(TARGET pianola)
    install(TARGETS pianola RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  endif()
  install(EXPORT pianolaTargets NAMESPACE pianola:: DESTINATION ${package_dir})
  configure_package_config_file(cmake/pianolaConfig.cmake.in
    ${PROJECT_BINARY_DIR}/pianolaConfig.cmake INSTALL_DESTINATION ${package_dir})
  write_basic_package_version_file(${PROJECT_BINARY_DIR}/pianolaConfigVersion.cmake
    COMPATIBILITY SameMinorVersion)
  install(FILES ${PROJECT_BINARY_DIR}/pianolaConfig.cmake
    ${PROJECT_BINARY_DIR}/pianolaConfigVersion.cmake cmake/FindUtf8proc.cmake
    DESTINATION ${package_dir})
  install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
endif()
