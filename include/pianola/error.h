// Errors of the pianola library.
//
// A failure is an exception of one type, `Error`, with a code and one message of the form
// "where: what, expected and found, what to do". Outcomes that a caller expects (a generation that
// ends, a request that does not fit) are values, not exceptions.
//
//   try { auto model = pianola::Model::open(path); }
//   catch (const pianola::Error& e) { std::cerr << e.what(); return e.exit_code(); }
#pragma once

#include <stdexcept>
#include <string>

namespace pianola {

enum class ErrorCode {
  kInvalidArgument,  // a flag, parameter or request is wrong
  kInvalidModel,     // a model file is malformed or inconsistent
  kUnsupported,      // well-formed, but not something this build can do
  kNotFound,         // a file or name does not exist
  kOutOfMemory,      // the plan does not fit, or a row cannot grow; nothing has changed
  kContextOverflow,  // more tokens than a slot can hold, or further back than a layer can go
  kDevice,           // the device failed; the engine is poisoned
  kInternal,         // a broken invariant of pianola itself
};

// The name used in messages, JSON and logs: "invalid_argument", "context_overflow", ...
const char* error_code_name(ErrorCode code) noexcept;

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}

  ErrorCode code() const noexcept { return code_; }
  // Process exit status: 2 for a wrong argument, 3 to 9 for the other codes in their order.
  int exit_code() const noexcept;

 private:
  ErrorCode code_;
};

}  // namespace pianola
