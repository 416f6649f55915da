#include "regions.h"

namespace standin {

uintptr_t Regions::add(uintptr_t address, std::size_t size) {
    const std::lock_guard lock(mutex_);
    if (all_.size() >= kMost) {
        return 0;
    }
    all_[++made_] = {address, size};
    return made_;
}

bool Regions::remove(uintptr_t handle) {
    const std::lock_guard lock(mutex_);
    return all_.erase(handle) != 0;
}

bool Regions::hold(uintptr_t address, std::size_t size) const {
    const std::lock_guard lock(mutex_);
    for (const auto &[handle, region] : all_) {
        if (address >= region.address && address - region.address <= region.size &&
            size <= region.size - (address - region.address)) {
            return true;
        }
    }
    return false;
}

}  // namespace standin
