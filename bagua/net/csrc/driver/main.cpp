// The driver's command line: NAME=VALUE arguments, see Options.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "side.h"

namespace bagua_net {
namespace {

bool read_option(const std::string& name, const std::string& value, Options& out) {
  if (name == "plugin") out.plugin = value;
  else if (name == "mode") out.mode = value;
  else if (name == "role") out.role = value;
  else if (name == "table") out.table = atoi(value.c_str());
  else if (name == "channels") out.channels = atoi(value.c_str());
  else if (name == "bytes") out.bytes = strtoull(value.c_str(), nullptr, 10);
  else if (name == "seconds") out.seconds = atof(value.c_str());
  else if (name == "warmup_seconds") out.warmup_seconds = atof(value.c_str());
  else if (name == "seed") out.seed = strtoull(value.c_str(), nullptr, 10);
  else if (name == "messages") out.messages = atoi(value.c_str());
  else if (name == "rounds") out.rounds = atoi(value.c_str());
  else if (name == "timeout_seconds") out.timeout_seconds = atof(value.c_str());
  else if (name == "device") out.device = atoi(value.c_str());
  else return false;
  return true;
}

int facts(Net& net) {
  int num = 0;
  if (net.devices(&num) != kSuccess) return report_failure({"devices", 0});
  std::string text;
  for (int i = 0; i < num; i++) {
    DeviceFacts found;
    const Result result = net.facts(i, found);
    if (result != kSuccess) return report_failure({"properties", result});
    text += std::string(i ? ", " : "") + "{\"name\": \"" + found.name + "\", \"speed_mbit\": " +
            std::to_string(found.speed_mbit) + "}";
  }
  printf("{\"plugin\": \"%s\", \"devices\": [%s]}\n", net.name(), text.c_str());
  return 0;
}

}  // namespace
}  // namespace bagua_net

extern "C" __attribute__((visibility("default"))) int bagua_net_drive(int num, const char** arguments) {
  using namespace bagua_net;
  Options options;
  options.role = "all";
  for (int i = 0; i < num; i++) {
    const char* equals = strchr(arguments[i], '=');
    if (!equals || !read_option(std::string(arguments[i], equals), equals + 1, options)) {
      fprintf(stderr, "unknown argument %s\n", arguments[i]);
      return 2;
    }
  }
  int status = 2;
  if (options.mode == "cycles") {
    status = run_cycles(options);
  } else {
    std::string reason;
    const std::unique_ptr<Net> net = Net::load(options.plugin.c_str(), options.table, reason);
    if (!net) {
      fprintf(stderr, "%s\n", reason.c_str());
      return 2;
    }
    const Result result = net->init();
    if (result != kSuccess) return report_failure({"init", result});
    if (options.mode == "rate") status = run_rate(*net, options);
    else if (options.mode == "fuzz") status = run_fuzz(*net, options);
    else if (options.mode == "setup") status = run_setup(*net, options);
    else if (options.mode == "facts") status = facts(*net);
    net->finalize();
  }
  fflush(stdout);
  return status;
}

#ifdef BAGUA_NET_DRIVER_PROGRAM
int main(int num, char** arguments) { return bagua_net_drive(num - 1, const_cast<const char**>(arguments + 1)); }
#endif
