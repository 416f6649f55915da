// How the stand-in says no: on standard error with the function's name, and with a code.
#pragma once

#include <acl/acl.h>

#define STANDIN_API __attribute__((visibility("default")))

namespace standin {

// Says why `function` fails, keeps the text for aclGetRecentErrMsg, and returns `code`.
STANDIN_API aclError refuse(aclError code, const char *function, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

// For what CANN does and this library does not: never a silent 0.
STANDIN_API aclError unimplemented(const char *function);

// A setting that cannot be used: tests would prove something else than they say.
[[noreturn]] STANDIN_API void fatal(const char *format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace standin

#define REFUSE(code, ...) ::standin::refuse(code, __func__, __VA_ARGS__)
