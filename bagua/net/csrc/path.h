// What the sending connections of this process to one peer over one interface have in common: the number of flows.

#pragma once

#include <memory>
#include <mutex>

#include "flow_count.h"
#include "interfaces.h"

namespace bagua_net {

class Path {
 public:
  Path(int num_flows, bool adaptive) : count_(num_flows, adaptive) {}

  // The path of a device to an address, whatever the port; made if there is none.
  static std::shared_ptr<Path> get(int device, const Address& peer, int num_flows);

  int level() const { return count_.level(); }
  int changes() const { return count_.changes(); }
  void add(const Sample& sample) {
    const std::lock_guard<std::mutex> lock(mutex_);
    count_.add(sample);
  }

 private:
  std::mutex mutex_;
  FlowCount count_;
};

}  // namespace bagua_net
