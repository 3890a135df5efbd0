# Uses pianola as other projects do, in a folder of its own.
#   CASE=package       installs the build, then builds and tests examples/ with find_package(pianola)
#   CASE=subdirectory  configures a project that adds pianola's source tree
cmake_minimum_required(VERSION 3.25)

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(status)
    string(JOIN " " command ${ARGN})
    message(FATAL_ERROR "${command}\nended with ${status}:\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
set(options -G ${GENERATOR} -D CMAKE_CXX_COMPILER=${COMPILER} -D CMAKE_BUILD_TYPE=Release)
if(LAUNCHER)
  list(APPEND options -D CMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER})
endif()

if(CASE STREQUAL "package")
  run(${CMAKE_COMMAND} --install ${BINARY} --prefix ${WORK}/prefix)
  # The examples are copied so that nothing of the source tree is within reach.
  file(COPY ${SOURCE}/examples DESTINATION ${WORK})
  run(${CMAKE_COMMAND} -S ${WORK}/examples -B ${WORK}/build ${options}
      -D CMAKE_PREFIX_PATH=${WORK}/prefix)
  run(${CMAKE_COMMAND} --build ${WORK}/build)
  run(${CMAKE_CTEST_COMMAND} --test-dir ${WORK}/build --output-on-failure --no-tests=error)
  message(STATUS "${output}")
elseif(CASE STREQUAL "subdirectory")
  file(WRITE ${WORK}/CMakeLists.txt "cmake_minimum_required(VERSION 3.25)
project(user CXX)
add_subdirectory(${SOURCE} pianola EXCLUDE_FROM_ALL)
add_executable(user main.cc)
target_link_libraries(user PRIVATE pianola::pianola)
if(PIANOLA_TESTS OR PIANOLA_WERROR OR PIANOLA_INSTALL)
  message(FATAL_ERROR \"a user's build takes over pianola's own switches\")
endif()
")
  file(WRITE ${WORK}/main.cc "#include <pianola/error.h>
int main() { return pianola::Error(pianola::ErrorCode::kInternal, \"\").code() ==
                    pianola::ErrorCode::kInternal ? 0 : 1; }
")
  run(${CMAKE_COMMAND} -S ${WORK} -B ${WORK}/build ${options})
else()
  message(FATAL_ERROR "CASE is package or subdirectory, not '${CASE}'")
endif()
