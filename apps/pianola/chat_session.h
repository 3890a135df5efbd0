// A conversation with a model: its messages, and one row of the engine that keeps what the turns
// have in common.
//
//   ChatSession session(loaded, generation_options);
//   session.ask("Hello", [](const std::string& text) { put(text); });
//   session.messages();                              // system, user, assistant, ...
//
// A turn that fails or is stopped before its first text leaves the conversation as it was.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "generation_options.h"
#include "model_options.h"
#include "pianola/generator.h"

namespace pianola::cli {

class ChatSession {
 public:
  // Refers to `loaded`, which must outlive it. Throws NotFound when the model has no chat template
  // and none was named.
  ChatSession(Loaded& loaded, const GenerationOptions& options);
  ~ChatSession();
  ChatSession(const ChatSession&) = delete;
  ChatSession& operator=(const ChatSession&) = delete;

  // Answers a question. Ctrl-C ends the answer, which keeps what it has. Throws ContextOverflow
  // when the conversation with this question does not fit.
  FinishReason ask(const std::string& question,
                   const std::function<void(const std::string&)>& on_text);
  // Takes back the last answer and its question, which is returned; "" when there is none.
  std::string take_back();
  // Forgets the oldest question and its answer; false when there is none.
  bool forget_oldest();

  void reset();  // forgets all but the system message
  void set_system(const std::string& text);
  const std::string& system() const { return system_; }
  // With the system message, when there is one.
  std::vector<ChatMessage> messages() const;
  void set_messages(const std::vector<ChatMessage>& messages);

  int turns() const { return static_cast<int>(messages_.size()) / 2; }
  // Figures of the last turn and of the whole conversation, for people.
  std::string stats() const;

 private:
  Loaded& loaded_;
  ChatTemplateOptions template_;
  GenerationRequest request_;  // of every turn, but for the prompt
  int row_;
  std::string system_;
  std::vector<ChatMessage> messages_;  // user and assistant in turn
  GenerationStats last_;
  FinishReason last_reason_ = FinishReason::kNone;
  long total_prompt_ = 0, total_reused_ = 0, total_generated_ = 0;
};

}  // namespace pianola::cli
