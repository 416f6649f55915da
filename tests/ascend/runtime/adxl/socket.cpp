#include "socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace standin {
namespace {

// Waits until `events` can be done.
Outcome wait_for(int fd, short events, Deadline deadline) {
    for (;;) {
        const auto left =
            std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
        if (left < 0) {
            return Outcome::timed_out;
        }
        pollfd polled{fd, events, 0};
        // At most a minute at once: a far deadline does not fit poll's number.
        const int ready = poll(&polled, 1, static_cast<int>(std::min<int64_t>(left + 1, 60'000)));
        if (ready > 0) {
            return Outcome::done;
        }
        if (ready < 0 && errno != EINTR) {
            return Outcome::broken;
        }
    }
}

// Moves all bytes with `step`, which is send or recv.
template <typename Step>
Outcome move_all(int fd, short events, std::size_t size, Deadline deadline, const Step &step) {
    for (std::size_t moved = 0; moved < size;) {
        const ssize_t count = step(moved);
        if (count > 0) {
            moved += static_cast<std::size_t>(count);
        } else if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            const Outcome outcome = wait_for(fd, events, deadline);
            if (outcome != Outcome::done) {
                return outcome;
            }
        } else if (count == 0 || errno != EINTR) {
            return Outcome::broken;
        }
    }
    return Outcome::done;
}

addrinfo *resolve(const Endpoint &endpoint, int flags) {
    addrinfo wanted{};
    wanted.ai_socktype = SOCK_STREAM;
    wanted.ai_flags = flags | AI_NUMERICSERV;
    addrinfo *found = nullptr;
    const int error =
        getaddrinfo(endpoint.host.c_str(), endpoint.port.c_str(), &wanted, &found);
    return error == 0 ? found : nullptr;
}

void send_at_once(int fd) {
    const int yes = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

}  // namespace

Deadline deadline_in(int64_t milliseconds) {
    return Clock::now() + std::chrono::milliseconds(milliseconds);
}

Endpoint Endpoint::parse(const std::string &text) {
    const auto colon = text.rfind(':');
    const bool has_port = colon != std::string::npos && text.find(']', colon) == std::string::npos;
    Endpoint endpoint{text.substr(0, has_port ? colon : std::string::npos),
                      has_port ? text.substr(colon + 1) : ""};
    if (endpoint.host.size() > 2 && endpoint.host.front() == '[' && endpoint.host.back() == ']') {
        endpoint.host = endpoint.host.substr(1, endpoint.host.size() - 2);
    }
    return endpoint;
}

Socket::~Socket() { close(); }

Socket::Socket(Socket &&other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

Socket &Socket::operator=(Socket &&other) noexcept {
    if (this != &other) {
        close();
        fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
}

void Socket::close() {
    if (fd_ >= 0) {
        ::close(fd_);
        fd_ = -1;
    }
}

void Socket::shut_down() const {
    if (fd_ >= 0) {
        shutdown(fd_, SHUT_RDWR);
    }
}

Outcome Socket::send(const void *data, std::size_t size, Deadline deadline) const {
    return move_all(fd_, POLLOUT, size, deadline, [&](std::size_t sent) {
        return ::send(fd_, static_cast<const std::byte *>(data) + sent, size - sent, MSG_NOSIGNAL);
    });
}

Outcome Socket::receive(void *data, std::size_t size, Deadline deadline) const {
    return move_all(fd_, POLLIN, size, deadline, [&](std::size_t received) {
        return recv(fd_, static_cast<std::byte *>(data) + received, size - received, 0);
    });
}

Outcome Socket::connect(const Endpoint &to, Deadline deadline) {
    addrinfo *const found = resolve(to, 0);
    Outcome outcome = Outcome::broken;
    for (const addrinfo *each = found; each != nullptr && outcome == Outcome::broken;
         each = each->ai_next) {
        Socket candidate(socket(each->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        if (!candidate.is_open() ||
            (::connect(candidate.fd_, each->ai_addr, each->ai_addrlen) != 0 &&
             errno != EINPROGRESS)) {
            continue;
        }
        outcome = wait_for(candidate.fd_, POLLOUT, deadline);
        int error = 0;
        socklen_t length = sizeof error;
        getsockopt(candidate.fd_, SOL_SOCKET, SO_ERROR, &error, &length);
        if (outcome == Outcome::done && error != 0) {
            outcome = Outcome::broken;
        }
        if (outcome == Outcome::done) {
            send_at_once(candidate.fd_);
            *this = std::move(candidate);
        }
    }
    if (found != nullptr) {
        freeaddrinfo(found);
    }
    return outcome;
}

std::optional<std::string> Socket::listen(const Endpoint &at) {
    addrinfo *const found = resolve(at, AI_PASSIVE);
    if (found == nullptr) {
        return "the host is unknown";
    }
    Socket made(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int yes = 1;
    setsockopt(made.fd_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    const bool listens = made.is_open() &&
                         bind(made.fd_, found->ai_addr, found->ai_addrlen) == 0 &&
                         ::listen(made.fd_, SOMAXCONN) == 0;
    const int error = errno;
    freeaddrinfo(found);
    if (!listens) {
        return strerror(error);
    }
    *this = std::move(made);
    return std::nullopt;
}

Socket Socket::accept() const {
    for (;;) {
        const int fd = accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0) {
            send_at_once(fd);
            return Socket(fd);
        }
        if (errno != EINTR && errno != ECONNABORTED) {
            return Socket();
        }
    }
}

}  // namespace standin
