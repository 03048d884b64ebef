// The kernels' own source, compiled as C++.
#include "../window_gather.cu"
