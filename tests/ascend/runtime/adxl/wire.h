// What two engines say to each other: the pieces, "go" or "no" from the one whose memory it is,
// the bytes, and for a write "done". Bytes go straight into memory: a transfer that breaks off
// leaves a part of them there.
#pragma once

#include "regions.h"
#include "socket.h"

namespace standin {

// Ends the process after half of the bytes.
enum class Ending { whole, dies_halfway };

// The side that asks.
adxl::Status ask(const Socket &peer, adxl::TransferOp operation,
                 const std::vector<adxl::TransferOpDesc> &pieces, Ending ending,
                 Deadline deadline);

// The side that is asked: serves transfers until the connection ends.
void serve(const Socket &peer, const Regions &regions);

}  // namespace standin
