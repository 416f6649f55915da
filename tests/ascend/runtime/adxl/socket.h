// A TCP connection whose every step has to be over by a deadline.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>

namespace standin {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

Deadline deadline_in(int64_t milliseconds);

enum class Outcome { done, timed_out, broken };

struct Endpoint {
    std::string host;
    std::string port;

    // "host:port" and "[host]:port"; a host alone has an empty port.
    static Endpoint parse(const std::string &text);
};

class Socket {
public:
    Socket() = default;
    explicit Socket(int fd) : fd_(fd) {}
    ~Socket();
    Socket(Socket &&other) noexcept;
    Socket &operator=(Socket &&other) noexcept;

    bool is_open() const { return fd_ >= 0; }
    void close();
    // Wakes whoever waits on it, in any thread.
    void shut_down() const;

    Outcome send(const void *data, std::size_t size, Deadline deadline) const;
    Outcome receive(void *data, std::size_t size, Deadline deadline) const;

    Outcome connect(const Endpoint &to, Deadline deadline);
    // Returns what went wrong, or nothing.
    std::optional<std::string> listen(const Endpoint &at);
    // The next connection; a closed one once this socket was shut down.
    Socket accept() const;

private:
    int fd_ = -1;
};

}  // namespace standin
