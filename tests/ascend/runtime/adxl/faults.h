// Faults of transfers, asked for in the environment or, while the process runs, in a file.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

namespace standin {

enum class Fault { none, refuse, stall, fail, die };

class Faults {
public:
    // Whether a connection fails now.
    bool refuses();
    // What the transfer that begins now suffers; counts it.
    Fault next_transfer();

private:
    void read();

    std::mutex mutex_;
    std::string text_;  // the wording that the next three were read from
    Fault fault_ = Fault::none;
    uint64_t first_ = 0;  // the transfers that it strikes, both included
    uint64_t last_ = 0;
    uint64_t begun_ = 0;  // since the wording changed
};

// The process's.
Faults &faults();

// How a process ends that was told to die: no clean-up, a code that nothing else uses.
constexpr int kDiedCode = 86;

}  // namespace standin
