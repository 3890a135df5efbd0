# pianola_layer(NAME DEPENDS layer... LINK library... SOURCES file...)
#
# Makes the static library pianola_NAME from the .cc files of the current folder (or from SOURCES).
# Headers are included as "NAME/file.h". The include path of a layer is a folder of its own in the
# build tree that holds one link to its sources, so a file cannot include a layer that its target
# does not name.
function(pianola_layer name)
  cmake_parse_arguments(LAYER "" "" "DEPENDS;LINK;SOURCES" ${ARGN})
  if(NOT LAYER_SOURCES)
    file(GLOB LAYER_SOURCES CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cc)
  endif()
  set(root ${PROJECT_BINARY_DIR}/layers/${name})
  file(MAKE_DIRECTORY ${root})
  if(NOT EXISTS ${root}/${name})
    file(CREATE_LINK ${CMAKE_CURRENT_SOURCE_DIR} ${root}/${name} SYMBOLIC)
  endif()
  set(target pianola_${name})
  if(LAYER_SOURCES)
    add_library(${target} STATIC ${LAYER_SOURCES})
    set(visibility PUBLIC)
    pianola_warnings(${target})
  else()
    add_library(${target} INTERFACE)
    set(visibility INTERFACE)
  endif()
  target_include_directories(${target} ${visibility}
    $<BUILD_INTERFACE:${root}>
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  foreach(dependency IN LISTS LAYER_DEPENDS)
    target_link_libraries(${target} ${visibility} pianola_${dependency})
  endforeach()
  target_link_libraries(${target} ${visibility} ${LAYER_LINK})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  set_property(GLOBAL APPEND PROPERTY PIANOLA_LAYERS ${target})
endfunction()

# Warnings, sanitizers and the debug switches every pianola target shares.
function(pianola_warnings target)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow
    -Wconversion -Wno-sign-conversion -Wno-missing-field-initializers
    $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict> $<$<BOOL:${PIANOLA_WERROR}>:-Werror>>
    # A header's constants are not all used by every kernel.
    $<$<COMPILE_LANGUAGE:CUDA>:-diag-suppress=177 -Xcompiler=-Wall,-Wextra>)
  # libstdc++ 12 marks what its own std::stable_sort calls as deprecated, and only GCC overlooks it.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    target_compile_options(${target} PRIVATE -Wno-deprecated-declarations)
  endif()
  if(PIANOLA_SANITIZE)
    target_compile_options(${target} PUBLIC -fsanitize=${PIANOLA_SANITIZE}
      -fno-omit-frame-pointer -fno-sanitize-recover=all)
    target_link_options(${target} PUBLIC -fsanitize=${PIANOLA_SANITIZE})
  endif()
  if(PIANOLA_COVERAGE)
    target_compile_options(${target} PRIVATE -fprofile-instr-generate -fcoverage-mapping)
    target_link_options(${target} PUBLIC -fprofile-instr-generate)
  endif()
endfunction()

# pianola_test(NAME SOURCES file... LAYERS layer... LABELS label... [TIMEOUT seconds] [LINK library...])
# A GoogleTest program, one CTest entry NAME.suite.case for each test case. Labels: cpu (the default), slow for what
# takes more than a few seconds or needs fetched data, threads for what ThreadSanitizer should see,
# cuda for what needs a GPU. A test that calls GTEST_SKIP() is reported as skipped.
function(pianola_test name)
  cmake_parse_arguments(TEST "" "TIMEOUT" "SOURCES;LAYERS;LABELS;LINK" ${ARGN})
  add_executable(${name} ${TEST_SOURCES})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  pianola_warnings(${name})
  foreach(layer IN LISTS TEST_LAYERS)
    target_link_libraries(${name} PRIVATE pianola_${layer})
  endforeach()
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  target_compile_definitions(${name} PRIVATE
    PIANOLA_SOURCE_DIR="${PROJECT_SOURCE_DIR}" PIANOLA_BINARY_DIR="${PROJECT_BINARY_DIR}")
  target_link_libraries(${name} PRIVATE ${TEST_LINK} GTest::gmock GTest::gtest GTest::gtest_main)
  if(NOT TEST_LABELS)
    set(TEST_LABELS cpu)
  endif()
  if(NOT TEST_TIMEOUT)
    set(TEST_TIMEOUT 300)
  endif()
  # ctest starts the costliest first: the longest test must not be the one that all wait for.
  set(cost 0)
  if(slow IN_LIST TEST_LABELS)
    set(cost 1000)
  endif()
  foreach(label threads cuda)
    if(${label} IN_LIST TEST_LABELS)
      if(NOT TARGET pianola_${label}_tests)
        add_custom_target(pianola_${label}_tests)
      endif()
      add_dependencies(pianola_${label}_tests ${name})
    endif()
  endforeach()
  # Tests are listed when ctest starts, so that a build runs nothing that it made. Lists do not
  # survive the PROPERTIES argument: the labels are set by a script of their own.
  include(GoogleTest)
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 NO_PRETTY_VALUES
    TEST_PREFIX ${name}. TEST_LIST ${name}_cases PROPERTIES TIMEOUT ${TEST_TIMEOUT} COST ${cost})
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/${name}_labels.cmake @ONLY CONTENT
"foreach(test IN LISTS @name@_cases)
  set_tests_properties(\"\${test}\" PROPERTIES LABELS \"@TEST_LABELS@\")
endforeach()
")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES
    ${CMAKE_CURRENT_BINARY_DIR}/${name}_labels.cmake)
endfunction()
