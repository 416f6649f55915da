#include "report.h"

#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <string>

namespace standin {
namespace {

thread_local std::string recent;

std::string formatted(const char *format, va_list arguments) {
    char text[512];
    vsnprintf(text, sizeof text, format, arguments);
    return text;
}

// One write, so that the lines of several threads and processes stay whole.
void say(const std::string &text) {
    const std::string line = "ascend stand-in: " + text + "\n";
    if (write(STDERR_FILENO, line.data(), line.size()) < 0) {
        return;  // standard error is closed: nobody listens
    }
}

}  // namespace

aclError refuse(aclError code, const char *function, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    recent = std::string(function) + ": " + formatted(format, arguments);
    va_end(arguments);
    say(recent + " (" + std::to_string(code) + ")");
    return code;
}

aclError unimplemented(const char *function) {
    return refuse(ACL_ERROR_API_NOT_SUPPORT, function, "not implemented by the stand-in");
}

void fatal(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say(formatted(format, arguments));
    va_end(arguments);
    _exit(2);
}

}  // namespace standin

extern "C" {

const char *aclGetRecentErrMsg() {
    return standin::recent.empty() ? nullptr : standin::recent.c_str();
}

// torch_npu logs every step here; only its errors are worth a test's output.
void aclAppLog(aclLogLevel level, const char *function, const char *, uint32_t, const char *format,
               ...) {
    if (level < ACL_ERROR) {
        return;
    }
    va_list arguments;
    va_start(arguments, format);
    standin::say(std::string("logged by ") + function + ": " +
                 standin::formatted(format, arguments));
    va_end(arguments);
}
}
