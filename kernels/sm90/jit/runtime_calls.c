/* Functions through which the host code of a kernel calls CUDA, by the names that CuTe DSL's
   objects have for them. The CUDA runtime is the one that the process has loaded; the driver is
   opened here, as the runtime does. */

#include <dlfcn.h>
#include <stddef.h>

typedef int error;

extern error cudaDeviceGetAttribute(int *, int, int);
extern error cudaFuncSetAttribute(const void *, int, int);
extern error cudaGetDevice(int *);
extern error cudaKernelSetAttributeForDevice(void *, int, int, int);
extern error cudaLaunchKernelExC(const void *, const void *, void **);
extern error cudaLibraryGetKernel(void **, void *, const char *);
extern error cudaLibraryLoadData(void **, const void *, void *, void **, unsigned, void *, void **,
                                 unsigned);

error _cudaDeviceGetAttribute(int *value, int attribute, int device) {
  return cudaDeviceGetAttribute(value, attribute, device);
}

error _cudaFuncSetAttribute(const void *function, int attribute, int value) {
  return cudaFuncSetAttribute(function, attribute, value);
}

error _cudaGetDevice(int *device) { return cudaGetDevice(device); }

error _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
  return cudaKernelSetAttributeForDevice(kernel, attribute, value, device);
}

error _cudaLaunchKernelEx(const void *config, const void *function, void **arguments) {
  return cudaLaunchKernelExC(config, function, arguments);
}

error _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  return cudaLibraryGetKernel(kernel, library, name);
}

error _cudaLibraryLoadData(void **library, const void *code, void *options, void **values,
                           unsigned count, void *more_options, void **more_values,
                           unsigned more_count) {
  return cudaLibraryLoadData(library, code, options, values, count, more_options, more_values,
                             more_count);
}

static void *driver_function(const char *name) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  return driver == NULL ? NULL : dlsym(driver, name);
}

#define UNKNOWN 999

error _cuKernelGetAttribute(int *value, int attribute, void *kernel, int ordinal) {
  int device;
  error (*get_device)(int *, int) = (error (*)(int *, int))driver_function("cuDeviceGet");
  error (*get_attribute)(int *, int, void *, int) =
      (error (*)(int *, int, void *, int))driver_function("cuKernelGetAttribute");
  if (get_device == NULL || get_attribute == NULL || get_device(&device, ordinal) != 0)
    return UNKNOWN;
  return get_attribute(value, attribute, kernel, device);
}
