// pianola doctor: what this machine and this build are, and whether the kernels compute what they
// should: one block for a bug report.
#include <sys/utsname.h>

#include <fstream>
#include <memory>
#include <set>
#include <sstream>

#include "backends/backend.h"
#include "backends/cpu/isa.h"
#include "base/thread_pool.h"
#include "build_info.h"
#include "command.h"
#include "kernel_checks.h"
#include "model_options.h"
#include "pianola/generator.h"
#include "signals.h"
#include "terminal.h"

namespace pianola::cli {
namespace {

struct DoctorOptions {
  ModelOptions model;
};

constexpr const char* kFooter = R"(
Examples:
  pianola doctor
  pianola doctor -m model.gguf

Paste the whole output into a bug report. Exit status 1 when a self-test fails. Errors are given as
multiples of what rounding explains: up to 1 is right.)";

std::string cpuinfo_value(const std::string& name) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(name)) {
      const std::size_t colon = line.find(':');
      if (colon != std::string::npos && colon + 2 <= line.size()) return line.substr(colon + 2);
    }
  }
  return "unknown";
}

// The flags that matter to the kernels, those that this processor has.
std::string cpu_features() {
  const std::set<std::string> wanted = {
      "avx",      "avx2",        "fma",         "f16c",     "avx512f",  "avx512bw", "avx512dq",
      "avx512vl", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"};
  std::istringstream flags(cpuinfo_value("flags"));
  std::string found;
  for (std::string flag; flags >> flag;) {
    if (wanted.count(flag)) found += (found.empty() ? "" : " ") + flag;
  }
  return found.empty() ? "none of those the kernels use" : found;
}

std::string memory_value(const std::string& name) {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(name + ":")) {
      return human_bytes(std::stod(line.substr(name.size() + 1)) * 1024);
    }
  }
  return "unknown";
}

std::string system_name() {
  utsname name = {};
  if (uname(&name) != 0) return "unknown";
  return fmt::format("{} {} {}", name.sysname, name.release, name.machine);
}

std::string isa_text() {
  std::string text;
  for (const cpu::Isa isa : cpu::supported_isas()) {
    text += (text.empty() ? "" : ", ") + std::string(cpu::isa_name(isa));
  }
  return text + fmt::format("; used: {}", cpu::isa_name(cpu::detect_isa()));
}

std::string backends_text() {
  std::string text;
  for (const std::string& name : backend_names()) text += (text.empty() ? "" : ", ") + name;
  return text;
}

void print_system() {
  put(fmt::format("pianola {}\n", version()));
  put(fmt::format("build          {}\n", build_description()));
  put(fmt::format("backends       {}\n", backends_text()));
  put(fmt::format("system         {}\n", system_name()));
  put(fmt::format("cpu            {}\n", cpuinfo_value("model name")));
  put(fmt::format("cpu features   {}\n", cpu_features()));
  put(fmt::format("instructions   {}\n", isa_text()));
  put(fmt::format("processors     {} usable\n", usable_cpus()));
  put(fmt::format("memory         {}, {} available\n", memory_value("MemTotal"),
                  memory_value("MemAvailable")));
}

// Returns whether all passed. One line for each instruction set, and one for each failure.
bool print_kernels() {
  const std::vector<KernelCheck> checks = check_kernels();
  bool all = true;
  for (std::size_t i = 0; i < checks.size();) {
    const std::string& isa = checks[i].isa;
    int passed = 0;
    int count = 0;
    const KernelCheck* worst = &checks[i];
    std::string failures;
    for (; i < checks.size() && checks[i].isa == isa; ++i) {
      const KernelCheck& check = checks[i];
      ++count;
      passed += check.passed() ? 1 : 0;
      if (!(check.error <= worst->error)) worst = &check;
      if (!check.passed()) {
        failures += fmt::format("  FAILED           {} ({}): error {:.3g}\n", check.kernel, isa,
                                check.error);
      }
    }
    all = all && passed == count;
    put(fmt::format("kernels {:<10} {} of {} passed; largest error {:.3f} ({})\n", isa, passed,
                    count, worst->error, worst->kernel));
    put(failures);
  }
  return all;
}

// Loads the model and lets it say something. Errors are part of the report.
bool print_model(const ModelOptions& options) {
  try {
    Loaded loaded = load(options);
    const ModelInfo& info = loaded.model.info();
    put(fmt::format("model          {} ({}, {}, {})\n", info.name, info.format, info.family,
                    info.weight_types));
    put(fmt::format("loaded         in {}, {}\n", human_seconds(loaded.seconds),
                    loaded.engine.backend_description()));
    GenerationRequest request;
    request.max_tokens = 16;
    if (loaded.model.has_chat_template() && loaded.model.has_tokenizer()) {
      request.prompt = loaded.model.encode_chat({{"user", "Say hello."}});
    } else if (loaded.model.has_tokenizer()) {
      request.prompt = loaded.model.tokenizer().encode("Hello");
    } else {
      request.prompt = {0};
    }
    Generator generator(loaded.engine, loaded.model, std::move(request));
    CancelOnInterrupt guard(generator);
    std::string answer;
    while (const auto piece = generator.next()) {
      answer += loaded.model.has_tokenizer() ? piece->text : fmt::format(" {}", piece->token);
    }
    for (char& c : answer) c = c == '\n' ? ' ' : c;
    put(fmt::format("answer         {} ({} tokens, {})\n", answer,
                    generator.stats().generated_tokens,
                    finish_reason_name(generator.finish_reason())));
    return generator.finish_reason() != FinishReason::kFailed;
  } catch (const Error& error) {
    put(fmt::format("model          FAILED: {}\n", error.what()));
    return false;
  }
}

int run(const DoctorOptions& options) {
  print_system();
  bool good = print_kernels();
  if (!options.model.path.empty()) good = print_model(options.model) && good;
  put(good ? "all is well\n" : "something is wrong\n");
  return good ? 0 : 1;
}

}  // namespace

void add_doctor(Command app, Action& action) {
  auto options = std::make_shared<DoctorOptions>();
  const Command command = app.subcommand("doctor", "Check this machine and build", kFooter);
  add_model_path(command, options->model);
  add_engine_options(command, options->model);
  command.callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace pianola::cli
