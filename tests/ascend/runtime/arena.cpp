#include "arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <shared_mutex>

#include "settings.h"

namespace standin {
namespace {

constexpr std::size_t kArenaSize = std::size_t{1} << 40;

struct Range {
    std::size_t size;
};

struct Arena {
    std::shared_mutex mutex;
    uintptr_t base = 0;
    uintptr_t shadow = 0;  // equal to base when addresses are not guarded
    uintptr_t next = 0;    // addresses are given out in turn, so that a stale one stays dead long
    std::map<uintptr_t, Range> reserved;
    std::map<uintptr_t, Block> mapped;

    uintptr_t end() const { return base + kArenaSize; }
};

uintptr_t take_address_space() {
    void *taken = mmap(nullptr, kArenaSize + kHugePage, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (taken == MAP_FAILED) {
        fatal("no address space for device memory: %s", strerror(errno));
    }
    const auto start = reinterpret_cast<uintptr_t>(taken);
    return (start + kHugePage - 1) / kHugePage * kHugePage;
}

Arena &arena() {
    static Arena *const once = [] {
        auto *made = new Arena;
        made->base = take_address_space();
        made->shadow = settings().guarded ? take_address_space() : made->base;
        made->next = made->base;
        return made;
    }();
    return *once;
}

std::size_t whole_pages(std::size_t size) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return (size + page - 1) / page * page;
}

void *shadow_of(const Arena &arena, uintptr_t address) {
    return reinterpret_cast<void *>(address - arena.base + arena.shadow);
}

template <typename Map>
typename Map::const_iterator holder(const Map &ranges, uintptr_t address) {
    auto after = ranges.upper_bound(address);
    if (after == ranges.begin()) {
        return ranges.end();
    }
    const auto candidate = std::prev(after);
    return address - candidate->first < candidate->second.size ? candidate : ranges.end();
}

// The first gap of that size at or after `from`; 0 if there is none.
uintptr_t gap_from(const Arena &arena, uintptr_t from, std::size_t size, std::size_t alignment) {
    uintptr_t start = (from + alignment - 1) / alignment * alignment;
    auto each = arena.reserved.upper_bound(start);
    if (each != arena.reserved.begin()) {
        const auto before = std::prev(each);
        if (before->first + before->second.size > start) {
            each = before;
        }
    }
    for (; each != arena.reserved.end() && each->first < start + size; ++each) {
        const uintptr_t behind = each->first + each->second.size;
        start = (behind + alignment - 1) / alignment * alignment;
    }
    return start + size < arena.end() ? start : 0;
}

}  // namespace

uintptr_t reserve_addresses(std::size_t size, std::size_t alignment) {
    if (alignment == 0) {
        alignment = kHugePage;
    }
    if (size == 0 || size >= kArenaSize || alignment >= kArenaSize) {
        return 0;
    }
    Arena &all = arena();
    const std::unique_lock lock(all.mutex);
    // The huge page behind stays free, so that running over the end never meets a neighbour.
    const std::size_t taken = (size + kHugePage - 1) / kHugePage * kHugePage + kHugePage;
    uintptr_t address = gap_from(all, all.next, taken, alignment);
    if (address == 0) {
        address = gap_from(all, all.base, taken, alignment);
    }
    if (address != 0) {
        all.reserved[address] = {taken};
        all.next = address + taken;
    }
    return address;
}

bool release_addresses(uintptr_t address) {
    Arena &all = arena();
    const std::unique_lock lock(all.mutex);
    const auto found = all.reserved.find(address);
    if (found == all.reserved.end()) {
        return false;
    }
    const auto inside = all.mapped.lower_bound(address);
    if (inside != all.mapped.end() && inside->first < address + found->second.size) {
        return false;
    }
    all.reserved.erase(found);
    return true;
}

bool map_block(const Block &block) {
    Arena &all = arena();
    const std::unique_lock lock(all.mutex);
    const auto range = holder(all.reserved, block.address);
    if (range == all.reserved.end() ||
        block.address + block.size > range->first + range->second.size - kHugePage) {
        return false;
    }
    const auto behind = all.mapped.lower_bound(block.address);
    if (holder(all.mapped, block.address) != all.mapped.end() ||
        (behind != all.mapped.end() && behind->first < block.address + block.size)) {
        return false;
    }
    void *at = mmap(shadow_of(all, block.address), whole_pages(block.size),
                    PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, block.fd,
                    static_cast<off_t>(block.offset));
    if (at == MAP_FAILED) {
        return false;
    }
    all.mapped[block.address] = block;
    return true;
}

std::optional<Block> unmap_block(uintptr_t address) {
    Arena &all = arena();
    const std::unique_lock lock(all.mutex);
    const auto found = all.mapped.find(address);
    if (found == all.mapped.end()) {
        return std::nullopt;
    }
    const Block block = found->second;
    void *const at = shadow_of(all, address);
    // Replaced, not removed: the addresses must not become anybody else's.
    if (mmap(at, whole_pages(block.size), PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
        fatal("device memory at %p cannot be unmapped: %s", at, strerror(errno));
    }
    all.mapped.erase(found);
    return block;
}

bool is_device_address(const void *address) {
    const auto number = reinterpret_cast<uintptr_t>(address);
    return number >= arena().base && number < arena().end();
}

std::optional<Block> block_at(const void *address) {
    Arena &all = arena();
    const std::shared_lock lock(all.mutex);
    const auto found = holder(all.mapped, reinterpret_cast<uintptr_t>(address));
    if (found == all.mapped.end()) {
        return std::nullopt;
    }
    return found->second;
}

Pin::Pin() { arena().mutex.lock_shared(); }

Pin::~Pin() { arena().mutex.unlock_shared(); }

std::byte *Pin::reach(const void *address, std::size_t size) const {
    if (!is_device_address(address)) {
        return static_cast<std::byte *>(const_cast<void *>(address));
    }
    const Arena &all = arena();
    const auto start = reinterpret_cast<uintptr_t>(address);
    // Neighbouring blocks are one piece of memory to whoever mapped them side by side.
    for (uintptr_t reached = start;;) {
        const auto block = holder(all.mapped, reached);
        if (block == all.mapped.end()) {
            return nullptr;
        }
        reached = block->first + block->second.size;
        if (reached - start >= size) {
            return static_cast<std::byte *>(shadow_of(all, start));
        }
    }
}

}  // namespace standin
