#include "ticket.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "memory.h"

namespace standin {
namespace {

constexpr uint32_t kStampBits = 22;
constexpr uint32_t kStampMask = (1U << kStampBits) - 1;
constexpr uint64_t kMagic = 0x74656b6369742d61;  // no other memory file starts like this
constexpr std::size_t kMostPids = 64;

struct Contents {
    uint64_t magic;
    uint64_t size;
    int32_t physical_device;
    int32_t memory_fd;
    uint32_t memory_stamp;
    uint32_t listed_only;
    uint32_t pid_count;
    int32_t pids[kMostPids];
};

struct Written {
    std::mutex mutex;
    std::map<int32_t, Contents> by_fd;
};

Written &written() {
    static Written *const once = new Written;
    return *once;
}

// The number of the file behind a descriptor; never 0.
uint32_t stamp_of(int fd) {
    struct stat status {};
    if (fstat(fd, &status) != 0) {
        return 0;
    }
    return (static_cast<uint32_t>(status.st_ino) & kStampMask) | (status.st_ino == 0 ? 1U : 0U);
}

bool store(int fd, const Contents &contents) {
    return pwrite(fd, &contents, sizeof contents, 0) == static_cast<ssize_t>(sizeof contents);
}

// Another process's descriptor, if it is still the file that was meant; else -1.
int open_descriptor(int32_t pid, int32_t fd, uint32_t stamp, int flags) {
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
    const int opened = open(path.c_str(), flags | O_CLOEXEC);
    if (opened >= 0 && stamp_of(opened) != stamp) {
        close(opened);
        errno = ESTALE;
        return -1;
    }
    return opened;
}

std::map<int32_t, Contents>::iterator find_own(const TicketName &name) {
    const auto found = written().by_fd.find(name.fd);
    const bool is_own = name.pid == getpid() && found != written().by_fd.end() &&
                        stamp_of(name.fd) == name.stamp;
    return is_own ? found : written().by_fd.end();
}

}  // namespace

std::string TicketName::text() const {
    char text[40];
    snprintf(text, sizeof text, "%x-%x-%x", static_cast<unsigned>(pid),
             static_cast<unsigned>(fd), stamp);
    return text;
}

bool TicketName::parse(const std::string &text, TicketName &name) {
    unsigned pid = 0;
    unsigned fd = 0;
    int length = 0;
    const int read = sscanf(text.c_str(), "%8x-%8x-%8x%n", &pid, &fd, &name.stamp, &length);
    name.pid = static_cast<int32_t>(pid);
    name.fd = static_cast<int32_t>(fd);
    return read == 3 && static_cast<std::size_t>(length) == text.size();
}

uint64_t TicketName::number() const {
    return static_cast<uint64_t>(pid) << 42 | static_cast<uint64_t>(fd) << kStampBits | stamp;
}

TicketName TicketName::from_number(uint64_t number) {
    return {static_cast<int32_t>(number >> 42),
            static_cast<int32_t>(number >> kStampBits & ((1U << 20) - 1)),
            static_cast<uint32_t>(number & kStampMask)};
}

bool write_ticket(int memory_fd, const Shared &shared, Access access, TicketName &name) {
    Contents contents{};
    contents.magic = kMagic;
    contents.size = shared.size;
    contents.physical_device = shared.physical_device;
    contents.memory_fd = memory_fd;
    contents.memory_stamp = stamp_of(memory_fd);
    contents.listed_only = access == Access::listed ? 1 : 0;
    const int fd = make_memory_file(sizeof contents);
    if (fd < 0) {
        return false;
    }
    if (!store(fd, contents)) {
        close(fd);
        return false;
    }
    const std::lock_guard lock(written().mutex);
    written().by_fd[fd] = contents;
    name = {getpid(), fd, stamp_of(fd)};
    return true;
}

bool admit(const TicketName &name, const int32_t *pids, std::size_t count) {
    const std::lock_guard lock(written().mutex);
    const auto own = find_own(name);
    if (own == written().by_fd.end() || count > kMostPids - own->second.pid_count) {
        return false;
    }
    std::copy(pids, pids + count, own->second.pids + own->second.pid_count);
    own->second.pid_count += static_cast<uint32_t>(count);
    return store(name.fd, own->second);
}

bool withdraw(const TicketName &name) {
    const std::lock_guard lock(written().mutex);
    const auto own = find_own(name);
    if (own == written().by_fd.end()) {
        return false;
    }
    close(own->first);
    written().by_fd.erase(own);
    return true;
}

void withdraw_all(int memory_fd) {
    const std::lock_guard lock(written().mutex);
    for (auto each = written().by_fd.begin(); each != written().by_fd.end();) {
        if (each->second.memory_fd == memory_fd) {
            close(each->first);
            each = written().by_fd.erase(each);
        } else {
            ++each;
        }
    }
}

int use_ticket(const TicketName &name, Shared &shared, std::string &why) {
    const int ticket = open_descriptor(name.pid, name.fd, name.stamp, O_RDONLY);
    if (ticket < 0) {
        why = "its exporter, process " + std::to_string(name.pid) + ", does not offer it: " +
              strerror(errno);
        return -1;
    }
    Contents contents{};
    const bool whole = pread(ticket, &contents, sizeof contents, 0) ==
                           static_cast<ssize_t>(sizeof contents) &&
                       contents.magic == kMagic && contents.pid_count <= kMostPids;
    close(ticket);
    if (!whole) {
        why = "it names no exported memory";
        return -1;
    }
    const int32_t *const listed = contents.pids;
    const int32_t *const end = listed + contents.pid_count;
    if (contents.listed_only != 0 && std::find(listed, end, getpid()) == end) {
        why = "its exporter did not list this process, " + std::to_string(getpid());
        return -1;
    }
    const int memory =
        open_descriptor(name.pid, contents.memory_fd, contents.memory_stamp, O_RDWR);
    if (memory < 0) {
        why = std::string("its memory is gone: ") + strerror(errno);
        return -1;
    }
    shared = {contents.size, contents.physical_device};
    return memory;
}

}  // namespace standin
