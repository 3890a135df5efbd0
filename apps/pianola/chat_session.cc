#include "chat_session.h"

#include <algorithm>

#include "base/check.h"
#include "signals.h"

namespace pianola::cli {

ChatSession::ChatSession(Loaded& loaded, const GenerationOptions& options)
    : loaded_(loaded),
      template_(make_template_options(options)),
      request_(make_request(options, loaded.model)),
      system_(options.system) {
  if (!loaded.model.has_chat_template() && template_.template_source.empty()) {
    fail(ErrorCode::kNotFound,
         "{}: the model has no chat template; name one with --chat-template (chatml), or use "
         "`pianola run`",
         loaded.model.info().path);
  }
  loaded.model.tokenizer();  // a model without one is refused before the first question
  row_ = loaded.engine.open_row({});
}

ChatSession::~ChatSession() { loaded_.engine.close_row(row_); }

FinishReason ChatSession::ask(const std::string& question,
                              const std::function<void(const std::string&)>& on_text) {
  std::vector<ChatMessage> conversation = messages();
  conversation.push_back({"user", question});
  request_.prompt = loaded_.model.encode_chat(conversation, template_);
  const int prompt = static_cast<int>(request_.prompt.size());
  if (prompt >= loaded_.engine.max_seq_len()) {
    fail(ErrorCode::kContextOverflow,
         "the conversation with this question has {} tokens, and the context holds {}: /forget "
         "drops the oldest question, /reset all of them; -c makes the context larger. Nothing is "
         "lost: /save FILE keeps the conversation",
         prompt, loaded_.engine.max_seq_len());
  }
  Generator generator(loaded_.engine, loaded_.model, row_, request_);
  std::string answer;
  {
    CancelOnInterrupt guard(generator);
    while (const auto piece = generator.next()) {
      answer += piece->text;
      if (!piece->text.empty()) on_text(piece->text);
    }
  }
  take_interrupt();
  last_ = generator.stats();
  last_reason_ = generator.finish_reason();
  total_prompt_ += last_.prompt_tokens;
  total_reused_ += last_.reused_tokens;
  total_generated_ += last_.generated_tokens;
  if (!answer.empty()) {
    messages_.push_back({"user", question});
    messages_.push_back({"assistant", answer});
  }
  return last_reason_;
}

std::string ChatSession::take_back() {
  if (messages_.empty()) return {};
  const std::string question = messages_[messages_.size() - 2].content;
  messages_.resize(messages_.size() - 2);
  return question;
}

bool ChatSession::forget_oldest() {
  if (messages_.empty()) return false;
  messages_.erase(messages_.begin(), messages_.begin() + 2);
  return true;
}

void ChatSession::reset() {
  messages_.clear();
  loaded_.engine.reset(row_);
}

void ChatSession::set_system(const std::string& text) { system_ = text; }

std::vector<ChatMessage> ChatSession::messages() const {
  std::vector<ChatMessage> all;
  if (!system_.empty()) all.push_back({"system", system_});
  all.insert(all.end(), messages_.begin(), messages_.end());
  return all;
}

void ChatSession::set_messages(const std::vector<ChatMessage>& messages) {
  const bool with_system = !messages.empty() && messages.front().role == "system";
  system_ = with_system ? messages.front().content : "";
  messages_.assign(messages.begin() + (with_system ? 1 : 0), messages.end());
}

std::string ChatSession::stats() const {
  const auto rate = [](int tokens, double seconds) { return seconds > 0 ? tokens / seconds : 0; };
  std::string text = fmt::format("turns: {}; cache: {} of {} tokens\n", turns(),
                                 loaded_.engine.length(row_), loaded_.engine.max_seq_len());
  if (last_reason_ != FinishReason::kNone) {
    const int computed = last_.prompt_tokens - last_.reused_tokens;
    text += fmt::format(
        "last turn: prompt {} tokens, {} reused from the cache, {} computed at {:.1f} tok/s; "
        "generated {} tokens at {:.1f} tok/s; stopped by {}\n",
        last_.prompt_tokens, last_.reused_tokens, computed, rate(computed, last_.prompt_seconds),
        last_.generated_tokens,
        rate(std::max(last_.generated_tokens - 1, 0), last_.generate_seconds),
        finish_reason_name(last_reason_));
    text += fmt::format("all turns: prompts {} tokens, {} reused; generated {} tokens\n",
                        total_prompt_, total_reused_, total_generated_);
  }
  return text;
}

}  // namespace pianola::cli
