// Included before all else in the bindings: the string streams of PyTorch's headers are compiled in. Those of the
// libstdc++ that compiles would ask for one as new (GCC 11's), and the binary would not load on systems that PyTorch
// itself serves.
#pragma once

#include <cstddef>  // libstdc++'s configuration, which defines the macro

#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 0
