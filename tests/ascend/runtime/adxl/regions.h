// The memory that an engine let others reach.
#pragma once

#include <map>
#include <mutex>

#include "adxl.h"

namespace standin {

class Regions {
public:
    // 0 if there are too many.
    uintptr_t add(uintptr_t address, std::size_t size);
    bool remove(uintptr_t handle);
    // Whether all bytes lie in one region.
    bool hold(uintptr_t address, std::size_t size) const;

private:
    // Mooncake's transport for Ascend counts on no more.
    static constexpr std::size_t kMost = 256;

    struct Region {
        uintptr_t address;
        std::size_t size;
    };

    mutable std::mutex mutex_;
    std::map<uintptr_t, Region> all_;
    uintptr_t made_ = 0;
};

}  // namespace standin
