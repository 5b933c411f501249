// Included first in the bindings, so that the string streams of PyTorch's headers are compiled in. With extern
// templates the binary would need a libstdc++ as new as the compiler's (GCC 11), and would not load on systems that
// PyTorch itself supports.
#pragma once

#include <cstddef>  // libstdc++'s configuration, which defines the macro

#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 0
