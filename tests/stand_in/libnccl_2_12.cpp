// The stand-in as NCCL was until 2.12: without the functions that csrc/nccl can do without.
#define WITHOUT_NEWER
#include "libnccl.cpp"  // NOLINT(bugprone-suspicious-include)
