#include "plan/relative_bias.h"

#include <gtest/gtest.h>

#include <boost/json.hpp>

#include "base/json_reader.h"
#include "base/mapped_file.h"

namespace pianola {
namespace {

// Against T5Attention of transformers: tools/golden/make_t5.py.
TEST(RelativeBias, HasTheBucketsOfTransformers) {
  const std::string path = std::string(PIANOLA_SOURCE_DIR) + "/tests/models/t5/buckets.json";
  const boost::json::value root = parse_json(read_text_file(path, 1 << 20), path);
  const int end = root.at("end").to_number<int>();
  for (const boost::json::value& c : root.at("cases").as_array()) {
    const RelativeBias bias{.buckets = c.at("buckets").to_number<int>(),
                            .max_distance = c.at("max_distance").to_number<int>(),
                            .both_directions = c.at("both_directions").as_bool()};
    const boost::json::array& changes = c.at("changes").as_array();
    std::size_t next = 0;
    int bucket = -1;
    for (int offset = changes[0].at(0).to_number<int>(); offset <= end; ++offset) {
      if (next < changes.size() && changes[next].at(0).to_number<int>() == offset) {
        bucket = changes[next++].at(1).to_number<int>();
      }
      ASSERT_EQ(relative_bucket(bias, offset), bucket)
          << bias.buckets << " of " << bias.max_distance << " at " << offset;
    }
    EXPECT_EQ(next, changes.size());
  }
}

// What backends make tables by.
TEST(RelativeBias, HasOneBucketBeyondTheLargestDistance) {
  for (const bool both : {false, true}) {
    const RelativeBias bias{.buckets = 32, .max_distance = 100, .both_directions = both};
    for (const int offset : {101, 1000, 1 << 24}) {
      EXPECT_EQ(relative_bucket(bias, -offset), relative_bucket(bias, -100));
      EXPECT_EQ(relative_bucket(bias, offset), relative_bucket(bias, 100));
    }
  }
}

}  // namespace
}  // namespace pianola
