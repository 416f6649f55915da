// Streams: each is a thread that does one operation after the other, later than it was asked to.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "device.h"

namespace standin {

using Operation = std::function<aclError()>;

class Stream {
public:
    Stream(Device &device, int32_t number);
    Stream(const Stream &) = delete;
    Stream &operator=(const Stream &) = delete;

    // `delayed` operations wait as long as ASCEND_STANDIN_DELAY_US says before they run.
    void submit(Operation operation, bool delayed);
    // Waits until all that was submitted is done; forever if the time-out is negative. Returns
    // what the first failed operation returned: a failed stream stays failed.
    aclError synchronize(int64_t timeout_ms);
    bool is_idle();
    // Drops what has not begun.
    void abort();
    void stop();
    void stop_on_failure(bool stop);

    Device &device() const { return device_; }
    int32_t number() const { return number_; }

private:
    struct Queued {
        Operation run;
        bool delayed;
    };

    void work();

    Device &device_;
    const int32_t number_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Queued> queue_;
    bool busy_ = false;
    bool stopping_ = false;
    bool stop_on_failure_ = false;
    aclError failure_ = ACL_SUCCESS;
    std::thread thread_;
};

// The stream of a handle; a null one is the default stream of the thread's device. Says what is
// wrong and returns nullptr if there is none.
std::shared_ptr<Stream> find_stream(const char *function, aclrtStream handle);

// Queues an operation; fails at once if the handle is no stream.
STANDIN_API aclError submit(const char *function, aclrtStream handle, Operation operation);

// Waits for all streams of a device.
aclError synchronize(Device &device, int64_t timeout_ms);

}  // namespace standin
