// A conversation as a file: JSON that people can read, written whole or not at all, and read with
// every rule checked.
//
//   save_transcript("talk.json", {model_name, messages});
//   Transcript talk = load_transcript("talk.json");
#pragma once

#include <string>
#include <vector>

#include "pianola/model.h"

namespace pianola::cli {

struct Transcript {
  std::string model;  // its name: for people
  // Perhaps one system message, then questions ("user") and answers ("assistant") in turn, ending
  // with an answer.
  std::vector<ChatMessage> messages;
};

// Writes a new file beside `path` and renames it: an earlier one is replaced only by a whole one.
// Throws std::system_error.
void save_transcript(const std::string& path, const Transcript& transcript);

// Throws NotFound, or InvalidArgument naming the field and the rule.
Transcript load_transcript(const std::string& path);

}  // namespace pianola::cli
