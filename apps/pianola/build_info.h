// What this binary was built from and how: for --version and bug reports.
#pragma once

#include <string>

namespace pianola::cli {

// "0.1.0"
const char* version();
// "g++ 12.2.0, Release (-O3 -DNDEBUG)"
std::string build_description();

}  // namespace pianola::cli
