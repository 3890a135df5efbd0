// pianola chat: a conversation at the terminal.
#include <unistd.h>

#include <memory>
#include <optional>

#include "base/check.h"
#include "chat_session.h"
#include "command.h"
#include "line_editor.h"
#include "signals.h"
#include "terminal.h"
#include "transcript.h"

namespace pianola::cli {
namespace {

struct ChatOptions {
  ModelOptions model;
  GenerationOptions generation;
  std::string load;
  bool quiet = false;
};

constexpr const char* kFooter = R"(
Examples:
  pianola chat -m model.gguf
  pianola chat -m model.gguf -c 16384 --temp 0.8 --system "Answer in one sentence."
  pianola chat -m model.gguf --load talk.json
  printf 'Hello\nAnd in French?\n' | pianola chat -m model.gguf

Ctrl-C stops an answer. /help lists the commands.)";

constexpr const char* kHelp =
    R"(/help          this list
/reset         forget the conversation
/forget        forget its oldest question and answer
/regen         answer the last question again
/edit          change the last question and ask it again
/system TEXT   the system message; without TEXT: show it
/stats         tokens, speed, and how much of the cache is reused
/save FILE     write the conversation; /load FILE reads it
/exit          leave (Ctrl-D does, too)
// at the start sends a text that begins with one /
Alt-Enter begins a new line; Ctrl-C stops an answer, and leaves when pressed twice at the prompt.
)";

class Chat {
 public:
  Chat(Loaded& loaded, const ChatOptions& options)
      : options_(options),
        session_(loaded, options.generation),
        model_name_(loaded.model.info().name),
        interactive_(is_terminal(STDIN_FILENO)) {}

  int run() {
    if (!options_.load.empty()) load_file(options_.load);
    if (interactive_ && !options_.quiet) note("{}: /help lists the commands", model_name_);
    bool interrupted_before = false;
    int status = 0;
    while (!leave_) {
      const Line line = editor_.read("> ", std::exchange(initial_, {}));
      if (line.input == LineInput::kEnd) break;
      if (line.input == LineInput::kInterrupt) {
        if (interrupted_before || !interactive_) return interactive_ ? 0 : kInterruptedExitCode;
        note("(Ctrl-C again, Ctrl-D or /exit leaves)");
        interrupted_before = true;
        give_up_edit();
        continue;
      }
      interrupted_before = false;
      before_edit_.reset();
      status = guarded([&] { take(line.text); });
      // A script must not go on as if the turn had worked.
      if (status != 0 && !interactive_) return status;
    }
    return 0;
  }

 private:
  // Runs one turn or command; what goes wrong is said, and the conversation goes on. Returns the
  // exit status that it would have.
  template <typename F>
  int guarded(F&& turn) {
    try {
      turn();
      return std::exchange(failed_, 0);
    } catch (const Error& error) {
      note("pianola: error: {}", error.what());
      if (error.code() == ErrorCode::kDevice || error.code() == ErrorCode::kInternal) throw;
      return error.exit_code();
    } catch (const std::system_error& error) {
      note("pianola: error: {}", error.what());
      return 1;
    }
  }

  void take(const std::string& text) {
    if (text.find_first_not_of(" \t\n") == std::string::npos) return;
    editor_.add_history(text);
    if (text.front() != '/') return ask(text);
    if (text.starts_with("//")) return ask(text.substr(1));
    const std::size_t space = std::min(text.find_first_of(" \n"), text.size());
    const std::size_t begin = std::min(text.find_first_not_of(" \n", space), text.size());
    const std::size_t end = text.find_last_not_of(" \n") + 1;
    command(text.substr(0, space), text.substr(begin, end > begin ? end - begin : 0));
  }

  void command(const std::string& name, const std::string& argument) {
    if (name == "/help") {
      put(kHelp);
    } else if (name == "/reset") {
      session_.reset();
      note("(a new conversation)");
    } else if (name == "/forget") {
      note("{}", session_.forget_oldest() ? "(forgot the oldest question)" : "(nothing to forget)");
    } else if (name == "/regen" || name == "/edit") {
      again(name == "/edit");
    } else if (name == "/system") {
      if (!argument.empty()) session_.set_system(argument);
      note("system: {}", session_.system().empty() ? "(none)" : session_.system());
    } else if (name == "/stats") {
      put(session_.stats());
    } else if (name == "/save") {
      need_file(name, argument);
      save_transcript(argument, {model_name_, session_.messages()});
      note("(saved {} turns to {})", session_.turns(), argument);
    } else if (name == "/load") {
      need_file(name, argument);
      load_file(argument);
    } else if (name == "/exit" || name == "/quit") {
      leave_ = true;
    } else {
      fail(ErrorCode::kInvalidArgument,
           "there is no command {}; /help lists them, // sends a text that begins with /", name);
    }
  }

  static void need_file(const std::string& name, const std::string& argument) {
    if (argument.empty()) fail(ErrorCode::kInvalidArgument, "{} needs a file name", name);
  }

  void load_file(const std::string& path) {
    const Transcript transcript = load_transcript(path);
    session_.set_messages(transcript.messages);
    if (!options_.quiet) note("(loaded {} turns from {})", session_.turns(), path);
  }

  void again(bool edit) {
    if (session_.turns() == 0) {
      note("(there is no question yet)");
      return;
    }
    const std::vector<ChatMessage> before = session_.messages();
    const std::string question = session_.take_back();
    if (edit) {
      initial_ = question;
      before_edit_ = before;
      return;
    }
    const int turns = session_.turns();
    try {
      ask(question);
    } catch (...) {
      session_.set_messages(before);
      throw;
    }
    if (session_.turns() == turns) session_.set_messages(before);  // stopped before its first text
  }

  void give_up_edit() {
    if (before_edit_) session_.set_messages(*before_edit_);
    before_edit_.reset();
  }

  void ask(const std::string& question) {
    bool at_line_start = true;
    const FinishReason reason = session_.ask(question, [&](const std::string& text) {
      put(text);
      at_line_start = text.back() == '\n';
    });
    if (!at_line_start) put("\n");
    switch (reason) {
      case FinishReason::kCancelled:
        note("(stopped)");
        if (!interactive_) failed_ = kInterruptedExitCode;
        break;
      case FinishReason::kContext:
        note(
            "(the context is full: the answer is cut. /forget drops the oldest question, /reset "
            "all; -c makes the context larger)");
        break;
      case FinishReason::kLength:
        note("(cut at {} tokens)", options_.generation.max_tokens);
        break;
      case FinishReason::kFailed:
        note(
            "pianola: error: generation: the model gave NaN or infinite values; its weights may "
            "be damaged");
        failed_ = kGenerationFailedExitCode;
        break;
      default:
        break;
    }
  }

  const ChatOptions& options_;
  ChatSession session_;
  LineEditor editor_;
  std::string model_name_;
  std::string initial_;                                  // stands in the next line
  std::optional<std::vector<ChatMessage>> before_edit_;  // until a changed question is sent
  bool interactive_;
  bool leave_ = false;
  int failed_ = 0;
};

int run(const ChatOptions& options) {
  Loaded loaded = load(options.model);
  return Chat(loaded, options).run();
}

}  // namespace

void add_chat(Command app, Action& action) {
  auto options = std::make_shared<ChatOptions>();
  const Command command = app.subcommand("chat", "Talk with a model", kFooter);
  add_model_path(command, options->model);
  command.option("--load", options->load, "Go on with a conversation that /save wrote")
      .type("FILE");
  command.flag("-q,--quiet", options->quiet, "No notes at the start").environment("PIANOLA_QUIET");
  add_generation_options(command, options->generation, -1);
  add_engine_options(command, options->model);
  command.callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace pianola::cli
