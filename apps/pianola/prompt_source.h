// Where a text comes from: an argument, -p, a file or standard input.
//
//   PromptSource source;
//   add_prompt_source(command, source, "PROMPT");
//   ...                                              // after parsing
//   std::string text = read_prompt(source);
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "command_line.h"
#include "pianola/tokenizer.h"

namespace pianola::cli {

struct PromptSource {
  Option argument;
  Option option;
  Option file;
};

void add_prompt_source(Command command, PromptSource& source, const char* what);

// The bytes as they are. Standard input is read when it is asked for ("-"), or when nothing else is
// named and it is no terminal. Throws InvalidArgument when there is none or more than one.
std::string read_prompt(const PromptSource& source);

// "1 2 3", "1,2,3" or "[1, 2, 3]". Throws InvalidArgument.
std::vector<TokenId> parse_ids(std::string_view text);
std::string format_ids(const std::vector<TokenId>& ids);

}  // namespace pianola::cli
