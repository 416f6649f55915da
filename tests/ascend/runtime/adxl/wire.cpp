#include "wire.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "../arena.h"
#include "faults.h"

namespace standin {
namespace {

using adxl::Status;

constexpr uint32_t kMagic = 0x6c786461;  // "adxl"
constexpr uint64_t kMostPieces = 1 << 20;
constexpr std::size_t kChunk = std::size_t{1} << 20;
// A peer that stays silent in the middle of a transfer this long is gone.
constexpr int64_t kPatienceMs = 60'000;

struct Request {
    uint32_t magic;
    uint32_t writes;
    uint64_t count;
};

struct Piece {
    uint64_t address;
    uint64_t size;
};

Status status_of(Outcome outcome) {
    switch (outcome) {
        case Outcome::done: return adxl::SUCCESS;
        case Outcome::timed_out: return adxl::TIMEOUT;
        default: return adxl::FAILED;
    }
}

// Copies a chunk out of or into memory, which is pinned for no longer than that takes: nobody who
// frees memory waits for the network.
bool load(std::byte *chunk, uintptr_t address, std::size_t size) {
    const Pin pin;
    const std::byte *const memory = pin.reach(reinterpret_cast<const void *>(address), size);
    if (memory != nullptr) {
        std::memcpy(chunk, memory, size);
    }
    return memory != nullptr;
}

bool save(const std::byte *chunk, uintptr_t address, std::size_t size) {
    const Pin pin;
    std::byte *const memory = pin.reach(reinterpret_cast<const void *>(address), size);
    if (memory != nullptr) {
        std::memcpy(memory, chunk, size);
    }
    return memory != nullptr;
}

// Sends or receives the bytes of all pieces in order, at most `most` of them.
class Mover {
public:
    Mover(const Socket &peer, Deadline deadline) : peer_(peer), deadline_(deadline) {}

    Status send(const Piece &piece, std::size_t most) {
        return each_chunk(piece, most, [this](uintptr_t address, std::size_t size) {
            if (!load(chunk_.data(), address, size)) {
                return adxl::FAILED;
            }
            return status_of(peer_.send(chunk_.data(), size, deadline_));
        });
    }

    Status receive(const Piece &piece) {
        return each_chunk(piece, piece.size, [this](uintptr_t address, std::size_t size) {
            const Status status = status_of(peer_.receive(chunk_.data(), size, deadline_));
            if (status != adxl::SUCCESS) {
                return status;
            }
            return save(chunk_.data(), address, size) ? adxl::SUCCESS : adxl::FAILED;
        });
    }

private:
    template <typename Move>
    Status each_chunk(const Piece &piece, std::size_t most, const Move &move) {
        const std::size_t size = std::min<std::size_t>(piece.size, most);
        for (std::size_t moved = 0; moved < size;) {
            const std::size_t step = std::min(kChunk, size - moved);
            const Status status = move(piece.address + moved, step);
            if (status != adxl::SUCCESS) {
                return status;
            }
            moved += step;
        }
        return adxl::SUCCESS;
    }

    const Socket &peer_;
    const Deadline deadline_;
    std::vector<std::byte> chunk_ = std::vector<std::byte>(kChunk);
};

Status receive_status(const Socket &peer, Deadline deadline) {
    uint32_t status = adxl::FAILED;
    const Outcome outcome = peer.receive(&status, sizeof status, deadline);
    return outcome == Outcome::done ? status : status_of(outcome);
}

bool send_status(const Socket &peer, Status status) {
    return peer.send(&status, sizeof status, deadline_in(kPatienceMs)) == Outcome::done;
}

[[noreturn]] void die() {
    refuse(static_cast<aclError>(adxl::FAILED), "AdxlEngine", "this process was told to die here");
    _exit(kDiedCode);
}

Status move_pieces(Mover &mover, const std::vector<Piece> &pieces, bool sends, Ending ending) {
    std::size_t left = SIZE_MAX;
    if (ending == Ending::dies_halfway) {
        left = std::accumulate(pieces.begin(), pieces.end(), std::size_t{0},
                               [](std::size_t sum, const Piece &each) { return sum + each.size; }) /
               2;
    }
    for (const Piece &each : pieces) {
        const Status status = sends ? mover.send(each, left) : mover.receive(each);
        if (status != adxl::SUCCESS) {
            return status;
        }
        left -= std::min<std::size_t>(left, each.size);
        if (left == 0) {
            die();
        }
    }
    return adxl::SUCCESS;
}

// False when the connection is of no more use.
bool serve_one(const Socket &peer, const Regions &regions) {
    // Between transfers a peer may be silent for as long as it likes.
    Request request{};
    if (peer.receive(&request, sizeof request, Deadline::max()) != Outcome::done ||
        request.magic != kMagic || request.count > kMostPieces) {
        return false;
    }
    const Deadline deadline = deadline_in(kPatienceMs);
    std::vector<Piece> pieces(request.count);
    if (peer.receive(pieces.data(), pieces.size() * sizeof(Piece), deadline) != Outcome::done) {
        return false;
    }
    for (const Piece &each : pieces) {
        if (!regions.hold(each.address, each.size)) {
            refuse(static_cast<aclError>(adxl::PARAM_INVALID), "AdxlEngine",
                   "a peer asks for %llu bytes at %#llx, which are not registered",
                   static_cast<unsigned long long>(each.size),
                   static_cast<unsigned long long>(each.address));
            return send_status(peer, adxl::PARAM_INVALID);
        }
    }
    if (!send_status(peer, adxl::SUCCESS)) {
        return false;
    }
    Mover mover(peer, deadline);
    const bool sends = request.writes == 0;
    const Status status = move_pieces(mover, pieces, sends, Ending::whole);
    if (status != adxl::SUCCESS) {
        return false;  // in the middle of the bytes there is no way to say so
    }
    return sends || send_status(peer, adxl::SUCCESS);
}

}  // namespace

Status ask(const Socket &peer, adxl::TransferOp operation,
           const std::vector<adxl::TransferOpDesc> &pieces, Ending ending, Deadline deadline) {
    const bool writes = operation == adxl::TransferOp::WRITE;
    std::vector<Piece> here;
    std::vector<Piece> there;
    for (const auto &each : pieces) {
        here.push_back({each.local_addr, each.len});
        there.push_back({each.remote_addr, each.len});
    }
    const Request request{kMagic, writes ? 1U : 0U, there.size()};
    Outcome outcome = peer.send(&request, sizeof request, deadline);
    if (outcome == Outcome::done) {
        outcome = peer.send(there.data(), there.size() * sizeof(Piece), deadline);
    }
    Status status = status_of(outcome);
    if (status == adxl::SUCCESS) {
        status = receive_status(peer, deadline);
    }
    if (status == adxl::SUCCESS) {
        Mover mover(peer, deadline);
        status = move_pieces(mover, here, writes, ending);
    }
    if (status == adxl::SUCCESS && writes) {
        status = receive_status(peer, deadline);
    }
    return status;
}

void serve(const Socket &peer, const Regions &regions) {
    while (serve_one(peer, regions)) {
    }
}

}  // namespace standin
