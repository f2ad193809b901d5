// SPDX-License-Identifier: Apache-2.0

// fa2: checks attention kernels, makes cases for them, and says what this
// machine computes with.
#include "tools/fa2/command.h"

int main(int argc, char** argv) { return fa2::tool::RunCommand(argc, argv); }
