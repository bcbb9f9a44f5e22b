#include "path.h"

#include <iterator>
#include <map>
#include <string>

#include "settings.h"

namespace bagua_net {

std::shared_ptr<Path> Path::get(int device, const Address& peer, int num_flows) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<Path>> paths;
  char text[kAddressText];
  Address host = peer;
  host.set_port(0);
  const std::string key = std::to_string(device) + " " + std::to_string(num_flows) + " " + to_text(host, text);
  const bool adaptive = settings().adaptive && settings().schedule != Schedule::stripes;
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto entry = paths.begin(); entry != paths.end();)
    entry = entry->second.expired() ? paths.erase(entry) : std::next(entry);
  std::shared_ptr<Path> found = paths[key].lock();
  if (!found) paths[key] = found = std::make_shared<Path>(num_flows, adaptive);
  return found;
}

}  // namespace bagua_net
