#include "base/mapped_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "pianola/error.h"

namespace pianola {
namespace {

namespace fs = std::filesystem;

class MappedFileTest : public testing::Test {
 public:
  ~MappedFileTest() override { fs::remove_all(folder_); }

 protected:
  MappedFileTest() {
    std::string name = (fs::temp_directory_path() / "pianola-map-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }

  fs::path write(const std::string& text) const {
    std::ofstream(folder_ / "f", std::ios::binary) << text;
    return folder_ / "f";
  }

  fs::path folder_;
};

std::string text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

template <typename F>
ErrorCode code_of(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.code();
  }
  ADD_FAILURE() << "nothing was thrown";
  return ErrorCode::kInternal;
}

TEST_F(MappedFileTest, MapsTheBytes) {
  const std::string text = std::string(10'000, 'a') + std::string("\0b", 2);
  const MappedFile file(write(text));
  EXPECT_EQ(text_of(file), text);
  EXPECT_EQ(file.path(), folder_ / "f");
  EXPECT_TRUE(MappedFile(write("")).bytes().empty());
  EXPECT_TRUE(MappedFile().bytes().empty());
}

TEST_F(MappedFileTest, DroppedPagesReadTheSame) {
  const std::string text(50'000, 'q');
  const MappedFile file(write(text));
  EXPECT_EQ(text_of(file), text);
  file.drop(0, 50'000);
  EXPECT_EQ(text_of(file), text);
  // Whatever the range, nothing outside the file is touched.
  for (const std::size_t at :
       {std::size_t{0}, std::size_t{1}, std::size_t{49'999}, std::size_t{50'000}, SIZE_MAX}) {
    for (const std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{60'000}, SIZE_MAX})
      file.drop(at, n);
  }
  EXPECT_EQ(text_of(file), text);
  MappedFile().drop(0, 100);
}

TEST_F(MappedFileTest, Moves) {
  MappedFile a(write("abc"));
  MappedFile b(std::move(a));
  EXPECT_EQ(text_of(b), "abc");
  EXPECT_TRUE(a.bytes().empty());  // NOLINT(bugprone-use-after-move): part of the contract
  MappedFile c;
  c = std::move(b);
  EXPECT_EQ(text_of(c), "abc");
}

TEST_F(MappedFileTest, RefusesWhatIsNotAFile) {
  EXPECT_EQ(code_of([&] { MappedFile(folder_ / "none"); }), ErrorCode::kNotFound);
  EXPECT_EQ(code_of([&] { MappedFile(write("x") / "y"); }), ErrorCode::kNotFound);
  EXPECT_EQ(code_of([&] { MappedFile{folder_}; }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { MappedFile("/dev/null"); }), ErrorCode::kInvalidArgument);
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(code_of([&] { MappedFile(folder_ / "pipe"); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { read_text_file(folder_ / "pipe", 10); }), ErrorCode::kInvalidArgument);
}

TEST_F(MappedFileTest, TextFilesHaveALimit) {
  const fs::path path = write("0123456789");
  EXPECT_EQ(read_text_file(path, 10), "0123456789");
  EXPECT_EQ(code_of([&] { read_text_file(path, 9); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { read_text_file(folder_ / "none", 9); }), ErrorCode::kNotFound);
}

}  // namespace
}  // namespace pianola
