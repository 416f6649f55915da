#include "stream.h"

#include <acl/error_codes/rt_error_codes.h>

#include <map>
#include <vector>

#include "settings.h"

namespace standin {
namespace {

struct Streams {
    std::mutex mutex;
    std::map<const void *, std::shared_ptr<Stream>> all;
    std::map<const Device *, std::shared_ptr<Stream>> defaults;
    int32_t made = 0;
};

// Never destroyed: its threads may still work while the process leaves.
Streams &streams() {
    static Streams *const once = new Streams;
    return *once;
}

std::shared_ptr<Stream> make_stream(Device &device) {
    return std::make_shared<Stream>(device, streams().made++);
}

}  // namespace

Stream::Stream(Device &device, int32_t number)
    : device_(device), number_(number), thread_([this] { work(); }) {}

void Stream::submit(Operation operation, bool delayed) {
    const std::lock_guard lock(mutex_);
    queue_.push_back({std::move(operation), delayed});
    changed_.notify_all();
}

aclError Stream::synchronize(int64_t timeout_ms) {
    std::unique_lock lock(mutex_);
    const auto is_done = [this] { return queue_.empty() && !busy_; };
    if (timeout_ms < 0) {
        changed_.wait(lock, is_done);
    } else if (!changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), is_done)) {
        return ACL_ERROR_RT_STREAM_SYNC_TIMEOUT;
    }
    return failure_;
}

bool Stream::is_idle() {
    const std::lock_guard lock(mutex_);
    return queue_.empty() && !busy_;
}

void Stream::abort() {
    const std::lock_guard lock(mutex_);
    queue_.clear();
    changed_.notify_all();
}

void Stream::stop() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        changed_.notify_all();
    }
    thread_.join();
}

void Stream::stop_on_failure(bool stop) {
    const std::lock_guard lock(mutex_);
    stop_on_failure_ = stop;
}

void Stream::work() {
    std::unique_lock lock(mutex_);
    for (;;) {
        changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
        if (queue_.empty()) {
            return;
        }
        const Queued next = std::move(queue_.front());
        queue_.pop_front();
        busy_ = true;
        const bool skipped = stop_on_failure_ && failure_ != ACL_SUCCESS;
        lock.unlock();
        if (next.delayed && settings().delay_us != 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(settings().delay_us));
        }
        const aclError result = skipped ? ACL_SUCCESS : next.run();
        lock.lock();
        busy_ = false;
        if (failure_ == ACL_SUCCESS) {
            failure_ = result;
        }
        changed_.notify_all();
    }
}

std::shared_ptr<Stream> find_stream(const char *function, aclrtStream handle) {
    Streams &known = streams();
    const std::lock_guard lock(known.mutex);
    if (handle != nullptr) {
        const auto found = known.all.find(handle);
        if (found == known.all.end()) {
            refuse(ACL_ERROR_RT_INVALID_HANDLE, function, "%p is no stream", handle);
            return nullptr;
        }
        return found->second;
    }
    Device *device = current_device();
    if (device == nullptr) {
        refuse(ACL_ERROR_RT_CONTEXT_NULL, function, "the thread has set no device");
        return nullptr;
    }
    std::shared_ptr<Stream> &stream = known.defaults[device];
    if (stream == nullptr) {
        stream = make_stream(*device);
    }
    return stream;
}

aclError submit(const char *function, aclrtStream handle, Operation operation) {
    const auto stream = find_stream(function, handle);
    if (stream == nullptr) {
        return ACL_ERROR_RT_INVALID_HANDLE;
    }
    stream->submit(std::move(operation), true);
    return ACL_SUCCESS;
}

aclError synchronize(Device &device, int64_t timeout_ms) {
    std::vector<std::shared_ptr<Stream>> of_device;
    {
        const std::lock_guard lock(streams().mutex);
        for (const auto &[handle, stream] : streams().all) {
            if (&stream->device() == &device) {
                of_device.push_back(stream);
            }
        }
        const auto found = streams().defaults.find(&device);
        if (found != streams().defaults.end()) {
            of_device.push_back(found->second);
        }
    }
    aclError result = ACL_SUCCESS;
    for (const auto &stream : of_device) {
        const aclError one = stream->synchronize(timeout_ms);
        result = result == ACL_SUCCESS ? one : result;
    }
    return result;
}

}  // namespace standin

using namespace standin;

namespace {

std::shared_ptr<Stream> take_stream(const char *function, aclrtStream handle) {
    const std::lock_guard lock(streams().mutex);
    const auto found = streams().all.find(handle);
    if (found == streams().all.end()) {
        refuse(ACL_ERROR_RT_INVALID_HANDLE, function, "%p is no stream", handle);
        return nullptr;
    }
    auto stream = found->second;
    streams().all.erase(found);
    return stream;
}

aclError synchronize_current(const char *function, int64_t timeout_ms) {
    Device *device = current_device();
    if (device == nullptr) {
        return refuse(ACL_ERROR_RT_CONTEXT_NULL, function, "the thread has set no device");
    }
    return synchronize(*device, timeout_ms);
}

}  // namespace

extern "C" {

// Priorities and flags say how fast, not what: nothing here depends on them.
aclError aclrtCreateStreamWithConfig(aclrtStream *handle, uint32_t, uint32_t) {
    Device *device = current_device();
    if (device == nullptr) {
        return REFUSE(ACL_ERROR_RT_CONTEXT_NULL, "the thread has set no device");
    }
    const std::lock_guard lock(streams().mutex);
    const auto stream = make_stream(*device);
    streams().all[stream.get()] = stream;
    *handle = stream.get();
    return ACL_SUCCESS;
}

aclError aclrtCreateStream(aclrtStream *handle) {
    return aclrtCreateStreamWithConfig(handle, 0, 0);
}

aclError aclrtDestroyStream(aclrtStream handle) {
    const auto stream = take_stream(__func__, handle);
    if (stream == nullptr) {
        return ACL_ERROR_RT_INVALID_HANDLE;
    }
    stream->stop();
    return ACL_SUCCESS;
}

aclError aclrtDestroyStreamForce(aclrtStream handle) {
    const auto stream = take_stream(__func__, handle);
    if (stream == nullptr) {
        return ACL_ERROR_RT_INVALID_HANDLE;
    }
    stream->abort();
    stream->stop();
    return ACL_SUCCESS;
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout_ms) {
    const auto stream = find_stream(__func__, handle);
    return stream == nullptr ? ACL_ERROR_RT_INVALID_HANDLE : stream->synchronize(timeout_ms);
}

aclError aclrtSynchronizeStream(aclrtStream handle) {
    return aclrtSynchronizeStreamWithTimeout(handle, -1);
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
    return synchronize_current(__func__, timeout_ms);
}

aclError aclrtSynchronizeDevice() { return synchronize_current(__func__, -1); }

aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus *status) {
    const auto stream = find_stream(__func__, handle);
    if (stream == nullptr) {
        return ACL_ERROR_RT_INVALID_HANDLE;
    }
    *status = stream->is_idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    return ACL_SUCCESS;
}

aclError aclrtStreamGetId(aclrtStream handle, int32_t *number) {
    const auto stream = find_stream(__func__, handle);
    if (stream == nullptr) {
        return ACL_ERROR_RT_INVALID_HANDLE;
    }
    *number = stream->number();
    return ACL_SUCCESS;
}

aclError aclrtStreamAbort(aclrtStream handle) {
    const auto stream = find_stream(__func__, handle);
    if (stream == nullptr) {
        return ACL_ERROR_RT_INVALID_HANDLE;
    }
    stream->abort();
    return stream->synchronize(-1);
}

aclError aclrtSetStreamFailureMode(aclrtStream handle, uint64_t mode) {
    const auto stream = find_stream(__func__, handle);
    if (stream == nullptr) {
        return ACL_ERROR_RT_INVALID_HANDLE;
    }
    stream->stop_on_failure(mode == ACL_STOP_ON_FAILURE);
    return ACL_SUCCESS;
}
}
