// A ticket lets another process map a memory file. It is a small file itself, named by the process
// that wrote it and its descriptor there: nothing is left in any folder when that process ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace standin {

// Where a ticket is. `stamp` tells it from what has the descriptor later.
struct TicketName {
    int32_t pid;
    int32_t fd;
    uint32_t stamp;  // 22 bits

    std::string text() const;
    static bool parse(const std::string &text, TicketName &name);
    // 22 bits of process, 20 of descriptor, 22 of stamp.
    uint64_t number() const;
    static TicketName from_number(uint64_t number);
};

// What a ticket says of the memory.
struct Shared {
    std::size_t size;
    int32_t physical_device;
};

enum class Access { anybody, listed };

// A ticket for a memory file of this process; false if the system has no descriptor for it.
bool write_ticket(int memory_fd, const Shared &shared, Access access, TicketName &name);
// Adds processes to the list of those that may use it; false if this is no ticket of this process
// or the list is full.
bool admit(const TicketName &name, const int32_t *pids, std::size_t count);
// False if this process wrote no such ticket.
bool withdraw(const TicketName &name);
// Ends every ticket for this memory file.
void withdraw_all(int memory_fd);
// Opens the memory of a ticket. Returns its descriptor, or -1 with the reason in `why`.
int use_ticket(const TicketName &name, Shared &shared, std::string &why);

}  // namespace standin
