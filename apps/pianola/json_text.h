// JSON as the program prints it: indented where people read it, numbers in plain decimal with as
// many digits as they have, NaN and infinities as null, text that is not UTF-8 repaired.
//
//   put(to_json_text(object));
#pragma once

#include <boost/json.hpp>

#include <string>
#include <string_view>

namespace pianola::cli {

// Objects and arrays of objects take a line for each member; arrays of plain values one line.
// Ends with a new line.
std::string to_json_text(const boost::json::value& value);

// Text that may hold any bytes, as a JSON string.
boost::json::string json_string(std::string_view text);

}  // namespace pianola::cli
