// PIANOLA_TEST_SANITIZED is defined in a build whose sanitizer makes code slow and owns malloc.
#pragma once

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define PIANOLA_TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define PIANOLA_TEST_SANITIZED 1
#endif
#endif
