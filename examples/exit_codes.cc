// Prints the errors of pianola with the exit status that its programs end with for each.
#include <pianola/error.h>

#include <cstdio>

int main() {
  for (const auto code : {pianola::ErrorCode::kInvalidArgument, pianola::ErrorCode::kInvalidModel,
                          pianola::ErrorCode::kUnsupported, pianola::ErrorCode::kNotFound,
                          pianola::ErrorCode::kOutOfMemory, pianola::ErrorCode::kContextOverflow,
                          pianola::ErrorCode::kDevice, pianola::ErrorCode::kInternal}) {
    std::printf("%d %s\n", pianola::Error(code, "").exit_code(), pianola::error_code_name(code));
  }
}
